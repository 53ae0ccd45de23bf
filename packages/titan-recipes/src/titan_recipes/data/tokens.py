"""Tokenise a source once, keep it on disk, read it mapped: every rank and every later run shares one copy.

A store is a folder of flat arrays, written under a temporary name and renamed. Its name is a digest of what went in
(the files' paths, sizes and times, the tokenizer, the format), so a changed file or tokenizer makes a new store.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..files import replacing
from .chat import ready_template, render
from .documents import digest
from .shapes import SHAPES, Shape
from .source import Row, Source, files_of, hub_dataset, rows, shape_of_rows
from .tokenizer import Spans, TrainingTokenizer, training_tokenizer

__all__ = ["TokenStore", "default_cache", "token_store"]

log = logging.getLogger(__name__)

FORMAT = 3
"""Raise when the contents of a store change meaning."""

PARTS = 40
"""The number of parts, about, that a text is cut into when it is the only one."""

CHUNK = 1000
"""Documents that are tokenised together, in parallel."""


@dataclass(frozen=True)
class TokenStore:
    """N documents as one array of T tokens. A document holds at least two tokens, one of them learned."""

    tokens_T: npt.NDArray[np.int32]
    learned_T: npt.NDArray[np.bool_] | None
    """Which tokens the loss counts; None: all."""
    ends_N: npt.NDArray[np.int64]
    digests_N: npt.NDArray[np.uint64]
    fingerprint: str
    summary: str

    def __len__(self) -> int:
        return len(self.ends_N)

    def slice_of(self, document: int) -> slice:
        """Where a document's tokens lie."""
        return slice(int(self.ends_N[document - 1]) if document else 0, int(self.ends_N[document]))

    @property
    def sizes_N(self) -> npt.NDArray[np.int64]:
        """Tokens per document."""
        return np.diff(self.ends_N, prepend=0)


def default_cache() -> Path:
    """Where stores are kept unless the recipe says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titan-recipes" / "tokens"


def token_store(source: Source, tokenizer: Any, cache: Path | None = None) -> TokenStore:
    """The tokens of `source`; made now if no store of them is in `cache` yet. Other processes wait, then read the same.

    A source or a tokenizer that has no identity (a function's documents, a tokenizer of one's own) is kept for this
    process only. Raises UserError for bad data, naming file and row.
    """
    tokenizer = training_tokenizer(tokenizer)
    key = _key(source, tokenizer)
    if key is None:
        return _unkept(source, tokenizer)
    folder = (cache or default_cache()) / key
    if not (folder / "store.json").is_file():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _make_kept(folder, source, tokenizer)
        except OSError as error:
            raise UserError(
                f"The token cache {str(folder.parent)!r} cannot be written: {error}\n"
                "Set --dataloader.cache_folder to a folder on a disk with room."
            ) from None
    return _open(folder)


def _make_kept(folder: Path, source: Source, tokenizer: Any) -> None:
    from filelock import FileLock

    with FileLock(folder.with_suffix(".lock")):
        if (folder / "store.json").is_file():  # another process made it while this one waited
            return
        with replacing(folder) as temporary:
            temporary.mkdir()
            _write(temporary, source, tokenizer)


@lru_cache(maxsize=8)
def _unkept(source: Source, tokenizer: Any) -> TokenStore:
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), source, tokenizer)
        return _open(Path(folder))  # what is mapped stays readable after its file's name is gone


def _open(folder: Path) -> TokenStore:
    about = json.loads((folder / "store.json").read_text())
    learned = folder / "learned.bool"
    return TokenStore(
        tokens_T=np.memmap(folder / "tokens.int32", np.int32, "r"),
        learned_T=np.memmap(learned, np.bool_, "r") if learned.is_file() else None,
        ends_N=np.load(folder / "ends.npy"),
        digests_N=np.load(folder / "digests.npy"),
        fingerprint=about["fingerprint"],
        summary=about["summary"],
    )


@dataclass
class _Left:
    """Documents that were left out, by reason."""

    duplicates: int = 0
    empty: int = 0
    nothing_learned: int = 0
    with_turn_marks: int = 0

    def __str__(self) -> str:
        counts = [f"{n:,} {reason.replace('_', ' ')}" for reason, n in asdict(self).items() if n]
        return f" ({', '.join(counts)} left out)" if counts else ""


@dataclass
class _Document:
    text: str
    spans: Spans | None
    """Characters that are learned; None: all."""
    ends: bool = True
    """Whether the end-of-text token follows: not inside a text that is kept in parts."""


def _write(folder: Path, source: Source, tokenizer: Any) -> None:
    seen: set[int] = set()
    ends: list[int] = []
    digests: list[int] = []
    total, left, stream = 0, _Left(), hashlib.sha256()
    chat = source.is_chat
    if chat and not ready_template(tokenizer):
        log.warning("the tokenizer has no chat template: conversations are written as plain ChatML")
    with (folder / "tokens.int32").open("wb") as tokens_file, (folder / "learned.bool").open("wb") as learned_file:
        documents, parts = _in_parts(_documents(source, tokenizer, left))
        while chunk := list(islice(documents, CHUNK)):
            fresh = []
            for document in chunk:
                number = digest(document.text)
                if number in seen and not parts:  # equal parts of one text are on one side of the holdout
                    left.duplicates += 1
                else:
                    seen.add(number)
                    fresh.append((document, number))
            encoded = _encode([document for document, _ in fresh], tokenizer)
            for (_, number), (tokens, learned) in zip(fresh, encoded, strict=True):
                if len(tokens) < 2 or (learned is not None and not learned[1:].any()):
                    left.nothing_learned += 1
                    continue
                tokens_file.write(tokens.tobytes())
                stream.update(tokens.tobytes())
                if learned is not None:
                    learned_file.write(learned.tobytes())
                    stream.update(learned.tobytes())
                total += len(tokens)
                ends.append(total)
                digests.append(number)
    if not chat:
        (folder / "learned.bool").unlink()
    if not ends:
        raise UserError(
            f"The dataset {source.name!r} is empty: no document with anything to learn in it was found{left}."
        )
    np.save(folder / "ends.npy", np.array(ends, np.int64))
    np.save(folder / "digests.npy", np.array(digests, np.uint64))
    stream.update(np.array(ends, np.int64).tobytes())
    kind = "conversations" if chat else "documents"
    count = f"one text in {len(ends):,} parts, cut at blank lines" if parts else f"{len(ends):,} {kind}"
    about = {
        "fingerprint": stream.hexdigest()[:16],
        "summary": f"{source.name}: {count}, {total:,} tokens{left}",
    }
    (folder / "store.json").write_text(json.dumps(about))


def _in_parts(documents: Iterator[_Document]) -> tuple[Iterator[_Document], bool]:
    """The documents; one text alone in parts of whole paragraphs, so that some of it can be held out. And whether it
    was one.
    """
    first = list(islice(documents, 2))
    if len(first) != 1 or first[0].spans is not None:
        return chain(first, documents), False
    text = first[0].text
    least, parts = len(text) // PARTS, [""]
    for paragraph in re.findall(r".+?(?:\n\s*\n|\Z)", text, re.DOTALL):
        if len(parts[-1]) > least:
            parts.append("")
        parts[-1] += paragraph
    if len(parts) == 1:
        return iter(first), False
    return (_Document(part, None, ends=number == len(parts)) for number, part in enumerate(parts, 1)), True


def _documents(source: Source, tokenizer: Any, left: _Left) -> Iterator[_Document]:
    shape: Shape | None = None
    for place, row in rows(source):
        if not source.is_chat:
            text = _text(row, source, place)
            if text.strip():
                yield _document(place, text)
            else:
                left.empty += 1
            continue
        if shape is None:
            shape = shape_of_rows(source, row, place)
            log.info("%s: rows are conversations of the shape %s", source.name, shape.name)
        rendered = render(shape.messages(row, place), tokenizer, place, row.get("tools"))
        if rendered is None:
            left.with_turn_marks += 1
        else:
            yield _document(place, *rendered)


def _document(place: str, text: str, spans: Spans | None = None) -> _Document:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: {text[error.start]!r} is half of a character (a surrogate alone), which is no text."
        ) from None
    return _Document(text, spans)


def _text(row: Row, source: Source, place: str) -> str:
    text = row.get(source.wanted)
    if not isinstance(text, str):
        talks = [shape for shape in SHAPES.values() if all(name in row for name in shape.needs)]
        hint = f" Conversations ({talks[0].name}) are read with --dataloader.format chat." if talks else ""
        raise UserError(f"{place}: expected a string {source.wanted!r}, found {str(row)[:80]!r}.{hint}")
    return text


Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_] | None]


def _encode(documents: Sequence[_Document], tokenizer: Any) -> Iterable[Encoded]:
    """Tokens, and which of them are learned.

    A text ends in the end-of-text token; a conversation as its template says.
    """
    backend = _backend(tokenizer)
    if backend is None:
        if any(document.spans is not None for document in documents):
            raise UserError(
                "Chat data needs a tokenizer of the `tokenizers` library (TorchTitan's HuggingFaceTokenizer)."
            )
        for document in documents:
            yield np.array(tokenizer.encode(document.text, add_bos=False, add_eos=True), np.int32), None
        return
    ending = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    encodings = backend.encode_batch([d.text for d in documents], add_special_tokens=False)
    for document, encoding in zip(documents, encodings, strict=True):
        if document.spans is None:
            yield np.array([*encoding.ids, *(ending if document.ends else [])], np.int32), None
        else:
            yield np.array(encoding.ids, np.int32), _learned(encoding.offsets, document.spans)


def _learned(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """True for the tokens that lie within a span of characters."""
    offsets_T2 = np.array(offsets, np.int64).reshape(-1, 2)
    learned_T = np.zeros(len(offsets_T2), bool)
    for begin, end in spans:
        learned_T |= (offsets_T2[:, 0] >= begin) & (offsets_T2[:, 1] <= end) & (offsets_T2[:, 1] > offsets_T2[:, 0])
    return learned_T


def _backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside TorchTitan's, which encodes many texts at once and knows each token's
    characters.
    """
    return tokenizer.tokenizer if type(tokenizer) is TrainingTokenizer else None


def _key(source: Source, tokenizer: Any) -> str | None:
    """A name for what a store would hold; None where nothing says whether it would be the same next time."""
    if source.documents is not None or _backend(tokenizer) is None:
        return None
    if source.path is not None:
        stats = [(file.resolve(), file.stat()) for file in files_of(source.path)]
        content: Any = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    else:
        content = hub_dataset(source)._fingerprint
    about = (FORMAT, content, source.format, source.wanted, _tokenizer_digest(Path(tokenizer.tokenizer_path)))
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]


def _tokenizer_digest(folder: Path) -> str:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt")
    stream = hashlib.sha256()
    for name in names:
        if (folder / name).is_file():
            stream.update(name.encode() + (folder / name).read_bytes())
    return stream.hexdigest()
