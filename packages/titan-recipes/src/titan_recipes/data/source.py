"""Where documents come from: rows of a file, a folder, a Hub dataset or a function, one at a time, each with its place.

A row is a dict. Text files are one row each, {"text": ...}; rows of JSON, CSV, Parquet and Arrow are taken as they are.
Nothing here knows about tokens.

JSON and CSV are read by Python and not by `datasets`, which gives all rows one schema: it fills in fields that a row
does not have, and takes a column of digits for numbers.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, Literal, cast

from ..errors import UserError
from .shapes import SHAPES, Row, Shape, shape_of

__all__ = ["SUFFIXES", "Format", "Row", "Source", "files_of", "rows", "shape_of_rows"]

Format = Literal["text", "chat", "messages", "sharegpt", "prompt-completion", "alpaca"]
"""What rows hold: a text to continue, or conversations: of a shape that their fields tell (chat), or of the named
one.
"""

TEXT_SUFFIXES = (".txt", ".md", ".rst")
LINES_SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".json", ".csv", ".tsv")
SUFFIXES = (*LINES_SUFFIXES, ".parquet", ".arrow")

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
"""Suffix after one of LINES_SUFFIXES -> the name that Arrow has for that compression."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place that training documents come from: exactly one of `path`, `hub` and `documents` is set."""

    path: str | None = None
    """A file, or a folder that is searched for files, in name order: .txt .md .rst .jsonl .json .csv .tsv, also with
    .gz or .zst after
    it, .parquet .arrow."""

    hub: str | None = None
    """A dataset on the Hugging Face Hub, "owner/name"; offline, one that is in the local cache."""

    subset: str | None = None
    """The Hub dataset's configuration, where it has several."""

    hub_split: str = "train"
    """The Hub dataset's split."""

    documents: Callable[[], Sequence[Any]] | None = None
    """A function returning the documents: strings, lists of messages, or rows."""

    format: Format = "text"
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
        if self.format not in ("text", "chat", *SHAPES):
            raise UserError(
                f"{self.name}: format {self.format!r} is unknown; choose one of text, chat, {', '.join(SHAPES)}."
            )
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
    def is_chat(self) -> bool:
        """Whether rows hold conversations."""
        return self.format != "text"

    @property
    def wanted(self) -> str:
        """The column of a text, or of messages that are given as they are."""
        return self.column or ("messages" if self.is_chat else "text")


def rows(source: Source) -> Iterator[tuple[str, Row]]:
    """(place, row) of every row, in order. `place` is file:line or the like, for messages.

    Raises UserError for what cannot be read, naming the place.
    """
    if source.path is not None:
        for file in files_of(source.path):
            try:
                yield from _READERS[suffix_of(file)](file, source)
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


def suffix_of(file: Path) -> str:
    """The suffix that says how a file is read: the one before .gz or .zst."""
    if file.suffix in COMPRESSION and (inner := Path(file.stem).suffix) in LINES_SUFFIXES:
        return inner
    return file.suffix


def files_of(path: str) -> list[Path]:
    """The files that a source's path stands for, in name order. Raises UserError when there is none."""
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(
            f"The dataset path {str(root)!r} does not exist (from {str(Path.cwd())!r}).\n"
            f"Set --dataloader.dataset_path, and the validator's, to a {' '.join(SUFFIXES)} file or a folder of them."
        )
    if root.is_dir():
        files = sorted(
            p for p in root.rglob("*") if suffix_of(p) in SUFFIXES and not p.is_dir() and not _beside(p, root)
        )
        if any(suffix_of(file) not in TEXT_SUFFIXES for file in files):
            files = [file for file in files if file.name != "README.md"]  # a data set's card, as the Hub has it
        if not files:
            raise UserError(f"The dataset {path!r} is empty: there is no {' '.join(SUFFIXES)} file in that folder.")
        for file in files:
            if not file.exists():
                raise UserError(f"{file} is a link to {file.readlink()}, which is not there.")
        return files
    if suffix_of(root) not in SUFFIXES:
        raise UserError(
            f"{root}: {root.suffix or 'no'} suffix; expected one of {', '.join(SUFFIXES)}, the first "
            f"{len(LINES_SUFFIXES)} also with {' or '.join(COMPRESSION)} after it."
        )
    return [root]


def _beside(file: Path, root: Path) -> bool:
    """Whether a file of the folder is no data: hidden, or what `datasets` keeps of its own computations."""
    cached = file.suffix == ".arrow" and file.name.startswith("cache-")
    cached = cached or file.name in ("dataset_info.json", "dataset_dict.json", "dataset_infos.json")
    cached = cached or (file.name == "state.json" and any(file.parent.glob("*.arrow")))
    return cached or any(part.startswith(".") for part in file.relative_to(root).parts)


def _open(file: Path) -> BufferedReader:
    """The bytes of a file, decompressed."""
    import pyarrow

    if file.suffix not in COMPRESSION:
        return file.open("rb")
    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), COMPRESSION[file.suffix])
    return BufferedReader(cast(Any, stream))


def _text(file: Path) -> TextIOWrapper:
    """A file's text. The mark that editors write at its beginning (BOM) is no part of it."""
    return TextIOWrapper(_open(file), encoding="utf-8-sig", newline="")


def _text_rows(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    if source.is_chat:
        raise UserError(
            f"{file}: a text file holds no messages; chat data comes as .jsonl, .json, .csv, .parquet or .arrow."
        )
    with _text(file) as text:
        yield str(file), {source.wanted: text.read().replace("\r\n", "\n")}


def _jsonl_rows(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
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


def _json_rows(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    """An array of objects, which is read whole; or an object a line, as in .jsonl."""
    with _text(file) as text:
        begin = text.read(1)
        while begin.isspace():
            begin = text.read(1)
        if begin != "[":
            yield from _jsonl_or_object(file, source)
            return
        try:
            found = json.loads(begin + text.read())
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is not JSON: {error}.") from None
    for number, row in enumerate(found):
        if not isinstance(row, dict):
            raise UserError(f"{file}[{number}]: expected a JSON object, found {str(row)[:80]!r}.")
        yield f"{file}[{number}]", row


def _jsonl_or_object(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    with _text(file) as text:
        try:
            found = json.loads(text.read())
        except (ValueError, RecursionError):
            found = None
    lists = [name for name, value in found.items() if isinstance(value, list)] if isinstance(found, dict) else []
    if isinstance(found, dict) and lists and not {"messages", "conversations", "prompt", source.wanted} & found.keys():
        raise UserError(
            f"{file} is one object with {', '.join(map(repr, found))}; expected an array of rows. Write "
            f"{lists[0]!r} as a file of its own."
        )
    if isinstance(found, dict):
        yield str(file), found
    else:
        yield from _jsonl_rows(file, source)


def _csv_rows(file: Path, source: Source) -> Iterator[tuple[str, Row]]:
    """Rows of a table with a header. Every value is a text."""
    csv.field_size_limit(1 << 30)
    with _text(file) as text:
        table = csv.reader(text, delimiter="\t" if suffix_of(file) == ".tsv" else ",", strict=True)
        try:
            names = next(table, [])
            if len(set(names)) < len(names) or "" in names:
                raise UserError(f"{file}: its first line names the columns, each once; found {', '.join(names)}.")
            _columns(file, source, names)
            for values in table:
                if not values:
                    continue
                if len(values) != len(names):
                    raise UserError(f"{file}:{table.line_num}: {len(values)} values for {len(names)} columns.")
                yield f"{file}:{table.line_num}", dict(zip(names, values, strict=True))
        except csv.Error as error:
            raise UserError(f"{file}:{table.line_num}: not a readable table: {error}.") from None


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
    """The columns to read: the wanted one; or those of a conversation's shape, and the tools that a chat template
    may list.
    """
    if source.is_chat:
        shape = shape_of(names, source.format, source.column, str(file))
        missing = [name for name in shape.needs if name not in names]
        wanted = [name for name in shape.fields if name in names]
    else:
        missing, wanted = [name for name in [source.wanted] if name not in names], [source.wanted]
    if missing:
        raise UserError(f"{file} has no column {missing[0]!r}; it has: {', '.join(names)}. Name one with column=...")
    return wanted


def shape_of_rows(source: Source, row: Row, place: str) -> Shape:
    """The shape of a source's conversations, by its first row."""
    return shape_of(row, source.format, source.column, place)


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
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
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
    _columns(Path(f"{source.hub}"), source, found.column_names)
    return found
