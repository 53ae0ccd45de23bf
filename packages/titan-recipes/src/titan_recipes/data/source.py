"""Where documents come from: rows of a file, a folder, a Hub dataset or a function, one at a time, each with its place.

A row is a dict. Text files are one row each, {"text": ...}; JSONL, Parquet and Arrow rows are taken as they are.
Nothing here knows about tokens.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError

__all__ = ["SUFFIXES", "Row", "Source", "files_of", "rows"]

Row = dict[str, Any]

TEXT_SUFFIXES = (".txt", ".md", ".rst")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet", ".arrow")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place that training documents come from: exactly one of `path`, `hub` and `documents` is set."""

    path: str | None = None
    """A file, or a folder that is searched for files, in name order: .txt .md .rst .jsonl .parquet .arrow."""

    hub: str | None = None
    """A dataset on the Hugging Face Hub, "owner/name"; offline, one that is in the local cache."""

    subset: str | None = None
    """The Hub dataset's configuration, where it has several."""

    hub_split: str = "train"
    """The Hub dataset's split."""

    documents: Callable[[], Sequence[Any]] | None = None
    """A function returning the documents: strings, lists of messages, or rows."""

    format: Literal["text", "chat"] = "text"
    """What a row holds: a text to continue, or a conversation of which the assistant's turns are learned."""

    column: str | None = None
    """The row's field with it. None: "text", or "messages" for chat."""

    weight: float | None = None
    """Share of the training samples, relative to the other sources'.

    None on all of them: every document once an epoch.
    """

    def __post_init__(self) -> None:
        given = [name for name in ("path", "hub", "documents") if getattr(self, name) is not None]
        if len(given) != 1:
            raise UserError(
                f"A data source is one of path, hub and documents; found {', '.join(given) or 'none of them'}."
            )
        if self.format not in ("text", "chat"):
            raise UserError(f"{self.name}: format {self.format!r} is unknown; choose text or chat.")
        if self.weight is not None and not (self.weight > 0 and math.isfinite(self.weight)):
            raise UserError(
                f"{self.name}: weight {self.weight} is not a positive number; leave the source out instead."
            )

    @property
    def name(self) -> str:
        """What messages call it."""
        if self.documents is not None:
            return getattr(self.documents, "__name__", "documents")
        return self.path or self.hub or ""

    @property
    def wanted(self) -> str:
        """The column that is read."""
        return self.column or ("messages" if self.format == "chat" else "text")


def rows(source: Source) -> Iterator[tuple[str, Row]]:
    """(place, row) of every row, in order. `place` is file:line or the like, for messages.

    Raises UserError for what cannot be read, naming the place.
    """
    if source.path is not None:
        for file in files_of(source.path):
            try:
                yield from _READERS[file.suffix](file, source)
            except UnicodeDecodeError as error:
                raise UserError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start}).") from None
            except OSError as error:
                raise UserError(f"{file} cannot be read: {error}") from None
    elif source.hub is not None:
        yield from _hub_rows(source)
    else:
        assert source.documents is not None
        for number, document in enumerate(source.documents()):
            row = document if isinstance(document, dict) else {source.wanted: document}
            yield f"{source.name}()[{number}]", row


def files_of(path: str) -> list[Path]:
    """The files that a source's path stands for, in name order. Raises UserError when there is none."""
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(
            f"The dataset path {str(root)!r} does not exist (from {str(Path.cwd())!r}).\n"
            f"Set --dataloader.dataset_path, and the validator's, to a {' '.join(SUFFIXES)} file or a folder of them."
        )
    if root.is_dir():
        files = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and not p.is_dir() and not _beside(p, root))
        if any(file.suffix not in TEXT_SUFFIXES for file in files):
            files = [file for file in files if file.name != "README.md"]  # a data set's card, as the Hub has it
        if not files:
            raise UserError(f"The dataset {path!r} is empty: there is no {' '.join(SUFFIXES)} file in that folder.")
        for file in files:
            if not file.exists():
                raise UserError(f"{file} is a link to {file.readlink()}, which is not there.")
        return files
    if root.suffix not in SUFFIXES:
        raise UserError(f"{root}: {root.suffix or 'no'} suffix; expected one of {', '.join(SUFFIXES)}.")
    return [root]


def _beside(file: Path, root: Path) -> bool:
    """Whether a file of the folder is no data: hidden, or what `datasets` keeps of its own computations."""
    cached = file.suffix == ".arrow" and file.name.startswith("cache-")
    return cached or any(part.startswith(".") for part in file.relative_to(root).parts)


def _text_rows(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    if source.format == "chat":
        raise UserError(f"{file}: a text file holds no messages; chat data comes as .jsonl, .parquet or .arrow.")
    yield str(file), {source.wanted: file.read_text(encoding="utf-8")}


def _jsonl_rows(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row, why = json.loads(line), ""
            except (ValueError, RecursionError) as error:
                row, why = None, f" ({error})"
            if not isinstance(row, dict):
                found = line.strip()[:80].decode(errors="replace")
                raise UserError(f"{file}:{number}: expected a JSON object, found {found!r}{why}.")
            yield f"{file}:{number}", row


def _parquet_rows(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, memory_map=True) as table:
            columns = _columns(file, source, table.schema_arrow.names)
            yield from _batch_rows(file, table.iter_batches(columns=columns))
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: not a readable Parquet file: {error}") from None


def _arrow_rows(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    """Both of Arrow's formats: the stream that `datasets` writes and the random-access file (Feather 2)."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as mapped:
            try:
                reader: Any = pyarrow.ipc.open_stream(mapped)
                batches = iter(reader)
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(mapped)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            columns = _columns(file, source, reader.schema.names)
            yield from _batch_rows(file, (batch.select(columns) for batch in batches))
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: not a readable Arrow file: {error}") from None


def _columns(file: Path, source: Source, names: Sequence[str]) -> list[str]:
    """The columns to read: the wanted one, and the tools that a chat template may list."""
    if source.wanted not in names:
        raise UserError(f"{file} has no column {source.wanted!r}; it has: {', '.join(names)}. Name one with column=...")
    return [source.wanted, *(["tools"] if source.format == "chat" and "tools" in names else [])]


def _batch_rows(file: Path, batches: Iterator[Any]) -> Iterator[tuple[str, Row]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            yield f"{file} row {number}", _unfilled(row)
            number += 1


def _unfilled(row: Row) -> Row:
    """A table's row without the fields that are there, as None, since another row has them: those of its messages and
    tools.
    """
    return {name: _without_none(value) for name, value in row.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[Path, Source], Iterator[tuple[str, Row]]]] = {
    **dict.fromkeys(TEXT_SUFFIXES, _text_rows),
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}


def _hub_rows(source: Source) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(hub_dataset(source)):
        yield f"{source.hub} row {number}", _unfilled(row)


def hub_dataset(source: Source) -> Any:
    """The Hub dataset of a source, downloaded or from the cache.

    Raises UserError saying what to do without a network.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(source.hub, source.subset, split=source.hub_split)
    except (OSError, ValueError) as error:  # datasets' errors for offline, not found, no such config or split
        raise UserError(
            f"The Hub dataset {source.hub!r} could not be loaded: {str(error).splitlines()[0]}\n"
            "Check its name, subset and hub_split. Without a network, download it on a machine that has one\n"
            f"(hf download --repo-type dataset {source.hub} --local-dir FOLDER) and set dataset_path to its files of "
            "that split."
        ) from None
    if source.wanted not in found.column_names:
        raise UserError(
            f"The Hub dataset {source.hub!r} has no column {source.wanted!r}; it has: {', '.join(found.column_names)}."
        )
    return found
