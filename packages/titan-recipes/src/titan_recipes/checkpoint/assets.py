"""What a checkpoint step carries besides tensors, so that it can be exported from its folder alone."""

import json
import shutil
from pathlib import Path
from typing import Any

from hf_ckpt_adapter.assets import asset_files

from ..data.taught import Taught

__all__ = ["write_assets"]


def write_assets(
    folder: Path,
    *,
    config: dict[str, Any],
    tokenizer_folder: Path,
    eos_token_id: int | None,
    taught: Taught,
    recipe: dict[str, Any] | None,
    recipe_source: Path | None,
) -> None:
    """Write config.json, generation_config.json, the tokenizer's files, recipe.py and recipe.json into `folder`.

    generation_config.json is the one beside the tokenizer when there is one, else the end-of-text token alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if taught.end_of_turn is not None:
        config = config | {"eos_token_id": taught.end_of_turn}
    _write_json(folder / "config.json", config)
    # The folder is the user's own choice: in a Hub cache its files are links into blobs/.
    for name, source in asset_files(tokenizer_folder, follow_symlinks=True):
        shutil.copyfile(source, folder / name)
    _write_generation(folder / "generation_config.json", eos_token_id, taught.end_of_turn)
    if taught.template is not None:
        (folder / "chat_template.jinja").write_text(taught.template, encoding="utf-8")
    if recipe is not None:
        _write_json(folder / "recipe.json", recipe)
    if recipe_source is not None:
        shutil.copyfile(recipe_source, folder / "recipe.py")


def _write_generation(file: Path, eos: int | None, end_of_turn: int | None) -> None:
    """Have `file` say where to stop: where it did, and at the token that ends a turn, which comes first."""
    if file.exists():
        settings = json.loads(file.read_text(encoding="utf-8"))
    else:
        settings = {"eos_token_id": eos, "pad_token_id": eos}
    if end_of_turn is not None:
        before = settings.get("eos_token_id", eos)
        stops = [end_of_turn, *(before if isinstance(before, list) else [before])]
        settings["eos_token_id"] = list(dict.fromkeys(stop for stop in stops if stop is not None))
    elif file.exists():
        return
    _write_json(file, settings)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    # default=str: a config may hold callables, paths and dtypes; their names are what a reader needs.
    file.write_text(json.dumps(value, indent=2, default=str) + "\n")
