"""What a checkpoint step carries besides tensors, so that it can be exported from its folder alone."""

import json
import shutil
from pathlib import Path
from typing import Any

from hf_ckpt_adapter.assets import asset_files

__all__ = ["write_assets"]


def write_assets(
    folder: Path,
    *,
    config: dict[str, Any],
    tokenizer_folder: Path,
    eos_token_id: int | None,
    recipe: dict[str, Any] | None,
    recipe_source: Path | None,
) -> None:
    """Write config.json, generation_config.json, the tokenizer's files, recipe.py and recipe.json into `folder`.

    generation_config.json is the one beside the tokenizer when there is one, else the end-of-text token alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    # The folder is the user's own choice: in a Hub cache its files are links into blobs/.
    for name, source in asset_files(tokenizer_folder, follow_symlinks=True):
        shutil.copyfile(source, folder / name)
    generation = folder / "generation_config.json"
    if not generation.exists():
        _write_json(generation, {"eos_token_id": eos_token_id, "pad_token_id": eos_token_id})
    if recipe is not None:
        _write_json(folder / "recipe.json", recipe)
    if recipe_source is not None:
        shutil.copyfile(recipe_source, folder / "recipe.py")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    # default=str: a config may hold callables, paths and dtypes; their names are what a reader needs.
    file.write_text(json.dumps(value, indent=2, default=str) + "\n")
