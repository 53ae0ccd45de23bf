"""Which model a run means: a name, a folder or a Hub id becomes sizes and, where there is one, a folder of weights.

Light: no torch. Nothing is downloaded, and config.json is parsed as JSON, never executed.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3_core import MODELS, Qwen3Config

from ..checkpoint.steps import ASSETS, is_step
from ..errors import UserError

__all__ = ["Model", "ModelSource", "find_model", "missing_shards", "refuse_remote_code", "unreadable_weights"]

Model = str | os.PathLike[str] | Qwen3Config
"""A Qwen3Config; a folder with a config.json; a Hub id (org/name[@revision]) in the local cache; a name of
qwen3_core.MODELS.
"""

_CODE_MAY_BE_NAMED_IN = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found. `folder` holds its config.json, or is None for sizes alone."""

    name: str
    config: Qwen3Config
    folder: Path | None = None

    @property
    def weights(self) -> Path | None:
        """The folder, if it has weights: safetensors, or a DCP step."""
        if self.folder is None:
            return None
        return self.folder if self.is_step or any(self.folder.glob("*.safetensors")) else None

    @property
    def unreadable(self) -> list[str]:
        """What lies in the folder in the place of weights that can be read; see `unreadable_weights`."""
        return [] if self.folder is None or self.weights is not None else unreadable_weights(self.folder)

    @property
    def is_step(self) -> bool:
        """A TorchTitan checkpoint step; its config.json and tokenizer lie in `assets/`."""
        return self.folder is not None and is_step(self.folder)

    @property
    def tokenizer(self) -> Path | None:
        """The folder of tokenizer.json, if there is one."""
        if self.folder is None:
            return None
        folder = self.folder / ASSETS if self.is_step else self.folder
        return folder if (folder / "tokenizer.json").is_file() else None


def find_model(model: Model) -> ModelSource:
    """Resolve `model`. A folder wins over a name. Raises UserError, with near names, for what is neither, for a folder
    whose config would run code, and for a config.json that is not a Qwen3's.
    """
    if isinstance(model, Qwen3Config):
        return ModelSource(model.model_type, model)
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_dir():
        path = path.resolve()
        return _from_folder(path, f"{path.parent.name}/{path.name}")
    if text in MODELS:
        return ModelSource(text, MODELS[text])
    if _HUB_ID.fullmatch(text):
        from hf_ckpt_adapter.sources import find

        try:
            return _from_folder(find(text).resolve(), text)
        except FileNotFoundError as error:
            known = text.partition("/")[2].partition("@")[0].removeprefix("Qwen3-")
            sizes = f"\nIts sizes alone, without weights, are the model {known!r}." if known in MODELS else ""
            raise UserError(f"{error}{sizes}") from None
    near = difflib.get_close_matches(text.removeprefix("Qwen3-"), MODELS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"There is no model {text!r}: not a folder, not a Hub id (org/name), not a known name.{hint}\nKnown: "
        f"{', '.join(MODELS)}."
    )


def unreadable_weights(folder: Path) -> list[str]:
    """Return a line for each thing in a folder without weights that says that there should be some.

    Such as weights of another format, an index without its shards, a download that did not end, an adapter alone,
    weights in a folder inside. "Nothing found" is not "nothing wanted".
    """
    found = []
    for pattern, what in _SIGNS_OF_WEIGHTS:
        names = sorted(str(file.relative_to(folder)) for file in folder.glob(pattern))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found.append(f"{names[0]}{more}: {what}")
    return found


def missing_shards(folder: Path) -> list[str]:
    """Return the files that an index of safetensors names and that are not in the folder."""
    found: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        try:
            found |= set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index} is no index of shards: it has no weight_map. Download it again.") from None
    return sorted(name for name in found if not (folder / name).is_file())


_SIGNS_OF_WEIGHTS = (
    ("*.safetensors.index.json", "an index whose files are not there; download them again"),
    ("adapter_*", "an adapter (LoRA) alone; merge it into its model first (PEFT's merge_and_unload)"),
    ("*.bin", "PyTorch's pickled format; save it again with Transformers' save_pretrained, which writes safetensors"),
    ("*.pt*", "a pickled format; save it as safetensors"),
    ("*.gguf", "a quantised format; take the model's safetensors"),
    ("*.distcp", "a TorchTitan step without .metadata, which is written last: a save that never finished"),
    ("**/*.incomplete", "a download that did not end; run it again"),
    ("**/*.part", "a download that did not end; run it again"),
    ("*.safetensors.*", "no name of finished weights; rename or download it again"),
    ("?*/*.safetensors", "weights in a folder inside; name that folder"),
    ("?*/.metadata", "a TorchTitan step in a folder inside; name that folder"),
    ("?*/step-*/.metadata", "TorchTitan steps in a folder inside; name one of them"),
)


def _from_folder(folder: Path, name: str) -> ModelSource:
    described = folder / ASSETS if is_step(folder) else folder
    refuse_remote_code(described)
    try:
        return ModelSource(name, Qwen3Config.from_hf(described), folder)
    except ValueError as error:
        raise UserError(f"{described} does not describe a Qwen3: {error}") from None


def refuse_remote_code(folder: Path) -> None:
    """Raise UserError if a configuration file in `folder` names code of its own (`auto_map`, at any depth).

    TorchTitan's Transformers backend reads configs with trust_remote_code=True, and Transformers asks a terminal that a
    cluster job does not have; either would run that code.
    """
    for name in _CODE_MAY_BE_NAMED_IN:
        file = folder / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{file} is not JSON: {error}") from None
        found = next(_auto_maps(content), None)
        if found is not None:
            raise UserError(
                f"{file} has auto_map = {json.dumps(found)}: loading it would run code from that folder.\n"
                "Qwen3 needs none. Make sure where the folder comes from, then delete the auto_map entry."
            )


def _auto_maps(content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        if "auto_map" in content:
            yield content["auto_map"]
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from _auto_maps(value)
