"""Text documents from where a run finds them, and the split into a training and a held-out part.

A source yields whole documents (str). Nothing here knows about tokens or tensors.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import UserError

PYTHON_DOCS = "python-docs"
"""The built-in source: the language reference that every CPython ships, in English, about 0.4 MB."""

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")


def load_documents(dataset: str, path: str | None) -> list[str]:
    """The documents of a built-in source (`path` None), a file, or a folder of files, duplicates dropped.

    .jsonl: one JSON object a line, its "text" a document. .txt, .md, .rst: each file is one document. A folder is read
    recursively in name order. Raises UserError when there is nothing to train on.
    """
    if path is None:
        if dataset != PYTHON_DOCS:
            raise UserError(
                f"dataloader.dataset {dataset!r} is unknown: the built-in one is {PYTHON_DOCS!r}. "
                "For your own text set --dataloader.dataset_path to a .jsonl or .txt file or a folder of them."
            )
        documents = python_docs()
    else:
        documents = list(_read_path(Path(path).expanduser()))
    documents = list(dict.fromkeys(document for document in documents if document.strip()))
    if not documents:
        raise UserError(f"The dataset {path or dataset!r} is empty: no document with any text in it was found.")
    return documents


def python_docs() -> list[str]:
    """The sections of `pydoc_data.topics`, each paragraph kept once.

    Topics quote each other (the one on compound statements contains those on `if` and `while`), so whole topics would leak
    from the training part into the held-out one. Shorter topics keep the paragraph, longer ones lose it.
    """
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    seen: set[str] = set()
    documents = []
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        section: list[str] = []
        for paragraph in topics[name].split("\n\n"):
            if _HEADING.match(paragraph) and section:
                documents.append("\n\n".join(section))
                section = []
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                section.append(paragraph.strip("\n"))
        if section:
            documents.append("\n\n".join(section))
    return documents


_HEADING = re.compile(r"\s*\S[^\n]*\n[*=~^-]{3,}$")
"""A line of text with a line of punctuation under it: how pydoc renders a section's title."""


def held_out(documents: Sequence[str], sizes: Sequence[int], share: float) -> set[int]:
    """Indices of documents that together hold at least `share` of the total size, chosen by a hash of their text.

    The hash makes the choice independent of the documents' order and of any seed. A share of 0 holds out nothing. Raises UserError when
    nothing would be left to train on.
    """
    if share <= 0:
        return set()
    wanted = share * sum(sizes)
    order = sorted(range(len(documents)), key=lambda i: hashlib.sha256(documents[i].encode()).digest())
    chosen: set[int] = set()
    size = 0
    for index in order:
        if size >= wanted:
            break
        chosen.add(index)
        size += sizes[index]
    if len(chosen) == len(documents):
        raise UserError(
            f"The dataset has {len(documents)} document(s), too few to hold out {share:.0%} for validation.\n"
            "Use a .jsonl file with a document a line or a folder of text files, or turn validation off: "
            "holdout=0 in the recipe's dataloader and --validator.no-enable."
        )
    return chosen


def _read_path(path: Path) -> Iterator[str]:
    if not path.exists():
        raise UserError(
            f"The dataset path {str(path)!r} does not exist (from {str(Path.cwd())!r}).\n"
            "Set --dataloader.dataset_path, and the validator's, to a .jsonl or .txt file or a folder of them."
        )
    files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES) if path.is_dir() else [path]
    for file in files:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file)
        elif file.suffix in TEXT_SUFFIXES:
            yield file.read_text(encoding="utf-8")
        else:
            raise UserError(f"{file}: {file.suffix or 'no'} suffix; expected one of {', '.join(TEXT_SUFFIXES)}.")


def _read_jsonl(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise UserError(
                    f'{file}:{number}: expected a JSON object with a string "text", found {line.strip()[:80]!r}.'
                )
            yield text
