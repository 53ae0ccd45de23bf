"""What a checkpoint step carries besides tensors, so that it can be exported from its folder alone."""

import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["TOKENIZER_FILES", "write_assets"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


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
    source = tokenizer_folder / "generation_config.json"
    if source.is_file():
        shutil.copyfile(source, folder / source.name)
    else:
        _write_json(folder / source.name, {"eos_token_id": eos_token_id, "pad_token_id": eos_token_id})
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    if recipe is not None:
        _write_json(folder / "recipe.json", recipe)
    if recipe_source is not None:
        shutil.copyfile(recipe_source, folder / "recipe.py")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    # default=str: a config may hold callables, paths and dtypes; their names are what a reader needs.
    file.write_text(json.dumps(value, indent=2, default=str) + "\n")
