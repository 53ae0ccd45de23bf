"""The dataloader: sources -> tokens -> samples -> batches of one constant shape, the same for every rank count.

Batches are [B, S] always, the last one included. Sample g of the stream goes to data-parallel rank (g // B) % ranks, so
ranks always have the same number of batches, and the state that a checkpoint carries is one number: samples seen by all
ranks.

    rows.py     rows of files and datasets       chat.py     a conversation's text, and what of it is learned
    tokens.py   rows -> mapped token stores     packing.py  documents -> numbered samples
    documents.py  which documents are held out  mixture.py  several sources, by weight, in one numbered stream

Shapes: B = local batch, S = sequence length, N = documents.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from ..errors import UserError
from .documents import PYTHON_DOCS, held_out, python_docs
from .mixture import Mixture
from .packing import Documents, Packing, Sample, Samples, SplitDocuments, WholeDocuments, pad
from .source import Format, Source
from .tokens import TokenStore, token_store

__all__ = ["Source", "TextDataLoader", "check_parts", "heed_flags", "split_documents", "stores_of"]

log = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class TextDataLoader(BaseDataLoader):
    """Texts and conversations for TorchTitan's trainer and validator."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: str = PYTHON_DOCS
        """python-docs (built in) or a dataset of the Hugging Face Hub, "owner/name"; used when nothing below names
        data.
        """

        dataset_path: str | None = None
        """A .jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt, .md or .rst file, or a folder of them; .gz and .zst,
        too.
        """

        documents: Annotated[Callable[[], Sequence[Any]] | None, tyro.conf.Suppress] = None
        """A function that returns the documents (recipes only). It wins over dataset and dataset_path."""

        sources: Annotated[Sequence[Source], tyro.conf.Suppress] = ()
        """Several sources, with or without weights (recipes only). They win over all of the above."""

        format: Format = "text"
        """text: rows hold a text to continue. chat: rows hold conversations, of a shape that their fields tell, and
        only the
        assistant's turns are learned. messages, sharegpt, prompt-completion and alpaca name the shape."""

        column: str | None = None
        """The field of a row that is read (default: text, or messages for chat)."""

        subset: str | None = None
        """The Hub dataset's configuration, where it has several."""

        hub_split: str = "train"
        """The Hub dataset's split."""

        packing: Packing | None = None
        """split: texts one after the other, cut where a sequence is full (default for text). whole: as many documents
        as fit, none cut. none: one document a sequence, padded (default for chat)."""

        split: Literal["train", "validation"] = "train"
        """Which part of the documents."""

        holdout: float = 0.1
        """Least share of each source's tokens that is held out for validation, in whole documents."""

        infinite: bool = True
        """Start a new, reshuffled epoch when the data ends. Validation is always one pass in order."""

        seed: int = 0
        """Seeds the order of the documents."""

        cache_folder: str | None = None
        """Where tokenised files are kept for all ranks and later runs (default: ~/.cache/titan-recipes/tokens)."""

        batches_per_step: Annotated[int, tyro.conf.Suppress] = 1
        """Batches that make one step: the end of the data is padded to a whole step. Set by the trainer."""

        def all_sources(self) -> tuple[Source, ...]:
            """What this config reads. Raises UserError for sources that cannot be read together."""
            if self.sources:
                weighted = [source.weight is not None for source in self.sources]
                if any(weighted) and not all(weighted):
                    raise UserError(
                        "Some data sources have a weight and some have none: give all of them one, or none."
                    )
                if not any(weighted) and len({source.is_chat for source in self.sources}) > 1:
                    raise UserError(
                        "Text and chat sources need weights to be mixed: they are packed each in their own way."
                    )
                return tuple(self.sources)
            self._refuse_unheeded()
            format, column = self.format, self.column
            if self.documents is not None:
                return (Source(documents=self.documents, format=format, column=column),)
            if self.dataset_path is not None:
                return (Source(path=self.dataset_path, format=format, column=column),)
            if self.dataset == PYTHON_DOCS:
                return (Source(documents=python_docs),)
            if "/" not in self.dataset:
                raise UserError(
                    f"dataloader.dataset {self.dataset!r} is unknown: the built-in one is {PYTHON_DOCS!r}, one of the "
                    "Hugging Face "
                    'Hub is named "owner/name".\nFor your own data set --dataloader.dataset_path to a file or a folder.'
                )
            hub, subset, hub_split = self.dataset, self.subset, self.hub_split
            return (Source(hub=hub, subset=subset, hub_split=hub_split, format=format, column=column),)

        def _refuse_unheeded(self) -> None:
            """Raise UserError for a setting that what is read has no use for."""
            built_in = not self.documents and not self.dataset_path and self.dataset == PYTHON_DOCS
            if built_in and (self.format != "text" or self.column):
                raise UserError(
                    f"dataloader.format {self.format}, column {self.column}: the built-in {PYTHON_DOCS} are plain "
                    "texts.\n"
                    "Name your data with --dataloader.dataset_path or --dataloader.dataset."
                )
            if (self.documents or self.dataset_path or built_in) and (self.subset or self.hub_split != "train"):
                raise UserError("dataloader.subset and hub_split are for a Hub dataset; this dataloader reads none.")

        def names_data(self) -> bool:
            """Whether a recipe or a user said what to read."""
            return bool(self.sources or self.documents or self.dataset_path or self.dataset != PYTHON_DOCS)

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ) -> None:
        self.config = config
        self.seq_len = seq_len
        training = config.split == "train"
        self.infinite = config.infinite and training
        self.ranks, self.rank, self.batch = dp_world_size, dp_rank, local_batch_size
        self.batches_per_step = config.batches_per_step
        self.samples_seen = 0
        parts = _parts(config, tokenizer)
        names = [", ".join(source.name for source, _, _ in part) for part in parts]
        weights = [part[0][0].weight or 1.0 for part in parts]
        self.stream = Mixture([self._samples(part) for part in parts], weights, names)
        self.fingerprint = self._fingerprint(parts)

    def _samples(self, part: "Part") -> Samples:
        config, packing = self.config, _packing(self.config, part)
        documents = _documents(config, part, self.seq_len)
        shuffle, seed, together = config.split == "train", config.seed, packing == "whole"
        if packing == "split":
            return SplitDocuments(documents, self.seq_len, shuffle=shuffle, seed=seed)
        samples = WholeDocuments(documents, self.seq_len, together=together, shuffle=shuffle, seed=seed)
        if samples.dropped:
            _warn_once(
                f"{part[0][0].name}: {samples.dropped} of {len(documents)} documents are longer than seq_len "
                f"{self.seq_len} and left out"
            )
        return samples

    def __iter__(self) -> Iterator[Batch]:
        end = None if self.infinite else self.stream.length
        batches = 0
        while end is None or self.samples_seen < end or batches % self.batches_per_step:
            first = self.samples_seen + self.rank * self.batch
            numbers = range(first, first + self.batch)
            samples = [self.stream.sample(n) if end is None or n < end else pad([], self.seq_len) for n in numbers]
            self.samples_seen += self.ranks * self.batch
            batches += 1
            yield _batch(samples)

    def _fingerprint(self, parts: Sequence["Part"]) -> str:
        """A digest of the tokens and of the order they are read in; a checkpoint's position means nothing
        on another.
        """
        config = self.config
        stores = [[(store.fingerprint, source.weight) for source, store, _ in part] for part in parts]
        about = (stores, self.seq_len, config.packing, config.split, config.holdout, config.seed)
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """Return how many samples were seen, and which data they were of."""
        return {"samples_seen": self.samples_seen, "fingerprint": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the samples that were seen. Raises UserError when the data changed since."""
        if not state_dict:
            return
        if state_dict["fingerprint"] != self.fingerprint:
            raise UserError(
                "The training data changed since this checkpoint was written (other documents, weights, tokenizer, "
                "packing, sequence length, holdout or seed), so its position in the data means nothing now.\nResume "
                "with the same data, or start the data anew with --checkpoint.exclude_from_loading dataloader."
            )
        self.samples_seen = int(state_dict["samples_seen"])


@lru_cache
def _warn_once(text: str) -> None:
    log.warning(text)  # TorchTitan builds a loader for each validation


def heed_flags(config: Any, given: Collection[str]) -> None:
    """Data that the command line names (`given`: its options' names) are read in the place of the recipe's."""
    if not isinstance(config, TextDataLoader.Config):
        return
    path, dataset = "dataloader.dataset_path" in given, "dataloader.dataset" in given
    if path and dataset:
        raise UserError("Both dataloader.dataset_path and dataloader.dataset are given: name one.")
    if path or dataset:
        config.documents, config.sources = None, ()
    if dataset:
        config.dataset_path = None


def _batch(samples: Sequence[Sample]) -> Batch:
    return (
        {
            "input": torch.from_numpy(np.stack([s.input_S for s in samples])),
            "positions": torch.from_numpy(np.stack([s.positions_S for s in samples])),
        },
        torch.from_numpy(np.stack([s.labels_S for s in samples])),
    )


Part = list[tuple[Source, TokenStore, "np.typing.NDArray[np.bool_]"]]
"""Sources that are read as one: (source, its tokens, which of its documents are held out)."""


def _parts(config: TextDataLoader.Config, tokenizer: BaseTokenizer) -> list[Part]:
    """A part for each weighted source, one for all when none has a weight."""
    if not 0 <= config.holdout < 1:
        raise UserError(
            f"dataloader.holdout {config.holdout} is no share of the data; give 0 (nothing) or more, and less than 1."
        )
    found = stores_of(config, tokenizer)
    groups = [[one] for one in found] if found[0][0].weight is not None else [found]
    names = [", ".join(source.name for source, _ in group) for group in groups]
    sizes = {
        name: (
            np.concatenate([store.digests_N for _, store in group]),
            np.concatenate([store.sizes_N for _, store in group]),
        )
        for name, group in zip(names, groups, strict=True)
    }
    parts = []
    for group, out_N in zip(groups, held_out(sizes, config.holdout), strict=True):
        cuts = np.cumsum([len(store) for _, store in group])[:-1]
        outs = np.split(out_N, cuts)
        parts.append([(source, store, out_N) for (source, store), out_N in zip(group, outs, strict=True)])
    return parts


def _packing(config: TextDataLoader.Config, part: Part) -> Packing:
    return config.packing or ("none" if part[0][0].is_chat else "split")


def _documents(config: TextDataLoader.Config, part: Part, seq_len: int) -> Documents:
    """Those of a part that the config's split reads.

    Raises UserError when there is none, or none that fits a sequence.
    """
    chosen = config.split == "validation"
    documents = Documents([(store, np.flatnonzero(out_N == chosen)) for _, store, out_N in part])
    fits = _packing(config, part) == "split" or bool((documents.sizes_N <= seq_len + 1).any())
    if not len(documents) or not fits:
        why = f"every document is longer than seq_len {seq_len}" if len(documents) else f"holdout={config.holdout}"
        raise UserError(f"The {config.split} part of {part[0][0].name!r} is empty ({why}).")
    return documents


def check_parts(config: TextDataLoader.Config, tokenizer: BaseTokenizer, seq_len: int) -> None:
    """Raise UserError if a loader of this config would have nothing to read."""
    for part in _parts(config, tokenizer):
        _documents(config, part, seq_len)


def stores_of(config: TextDataLoader.Config, tokenizer: BaseTokenizer) -> list[tuple[Source, TokenStore]]:
    """The sources of a config with their tokens, tokenised now unless they were before."""
    cache = Path(config.cache_folder).expanduser() if config.cache_folder else None
    return [(source, token_store(source, tokenizer, cache)) for source in config.all_sources()]


def split_documents(config: TextDataLoader.Config, tokenizer: BaseTokenizer) -> tuple[Documents, Documents]:
    """All training and all held-out documents of a config."""
    parts = [one for part in _parts(config, tokenizer) for one in part]
    train, validation = (
        Documents([(store, np.flatnonzero(out_N == chosen)) for _, store, out_N in parts]) for chosen in (False, True)
    )
    return train, validation
