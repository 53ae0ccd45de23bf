"""The text dataloader: documents -> tokens -> packed batches of one constant shape, the same for every rank count.

Batches are [B, S] always, the last one included. Global sample g goes to data-parallel rank (g // B) % ranks, so ranks
always have the same number of batches, and the state that a checkpoint carries is one number: samples seen by all ranks.

Shapes: B = local batch, S = sequence length.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from .documents import PYTHON_DOCS, held_out, load_documents
from .errors import UserError
from .packing import PackedDocuments, Sample, Tokens

__all__ = ["TextDataLoader", "split_tokens"]

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class TextDataLoader(BaseDataLoader):
    """Packed text for TorchTitan's trainer and validator."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: str = PYTHON_DOCS
        """Built-in source, used when neither dataset_path nor documents is given."""

        dataset_path: str | None = None
        """A .jsonl file (a "text" a line), a .txt/.md/.rst file, or a folder of them."""

        documents: Annotated[Callable[[], Sequence[str]] | None, tyro.conf.Suppress] = None
        """For recipes: a function returning the documents. It wins over dataset and dataset_path."""

        split: Literal["train", "validation"] = "train"
        """Which part of the documents."""

        holdout: float = 0.1
        """Least share of the tokens that is held out for validation, in whole documents."""

        infinite: bool = True
        """Start a new, reshuffled epoch when the data ends. Validation is always one pass in order."""

        seed: int = 0
        """Seeds the order of the documents."""

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
        train, validation = split_tokens(config, tokenizer)
        training = config.split == "train"
        self.packed = PackedDocuments(train if training else validation, seq_len, shuffle=training, seed=config.seed)
        if self.packed.samples == 0:
            raise UserError(f"The {config.split} part of the dataset is empty (holdout={config.holdout}).")
        self.infinite = config.infinite and training
        self.ranks, self.rank, self.batch = dp_world_size, dp_rank, local_batch_size
        self.samples_seen = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.infinite or self.samples_seen < self.packed.samples:
            first = self.samples_seen + self.rank * self.batch
            samples = [self._sample(first + i) for i in range(self.batch)]
            self.samples_seen += self.ranks * self.batch
            yield (
                {
                    "input": torch.from_numpy(np.stack([s.input_S for s in samples])),
                    "positions": torch.from_numpy(np.stack([s.positions_S for s in samples])),
                },
                torch.from_numpy(np.stack([s.labels_S for s in samples])),
            )

    def _sample(self, index: int) -> Sample:
        epoch, within = divmod(index, self.packed.samples)
        if epoch and not self.infinite:
            return self.packed.padding()
        return self.packed.sample(epoch, within)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the token stream and the order it is read in; a checkpoint's position means nothing on another."""
        digest = hashlib.sha256(f"{self.packed.seq_len} {self.packed.seed} {self.packed.shuffle}".encode())
        for document in self.packed.documents:
            digest.update(document.tobytes())
        return digest.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        return {"samples_seen": self.samples_seen, "fingerprint": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        if state_dict["fingerprint"] != self.fingerprint:
            raise UserError(
                "The training data changed since this checkpoint was written (other documents, tokenizer, sequence length or "
                "seed), so its position in the data means nothing now.\nResume with the same data, or start the data anew "
                "with --checkpoint.exclude_from_loading dataloader."
            )
        self.samples_seen = int(state_dict["samples_seen"])


def split_tokens(config: TextDataLoader.Config, tokenizer: BaseTokenizer) -> tuple[list[Tokens], list[Tokens]]:
    """Training and held-out documents as token arrays, each ending in the tokenizer's end-of-text. Cached."""
    return _split_tokens(config.dataset, config.dataset_path, config.documents, config.holdout, tokenizer)


@lru_cache(maxsize=4)
def _split_tokens(
    dataset: str,
    path: str | None,
    documents: Callable[[], Sequence[str]] | None,
    holdout: float,
    tokenizer: BaseTokenizer,
) -> tuple[list[Tokens], list[Tokens]]:
    texts = list(dict.fromkeys(documents())) if documents is not None else load_documents(dataset, path)
    tokens = [np.array(tokenizer.encode(text, add_bos=False, add_eos=True), np.int64) for text in texts]
    out = held_out(texts, [len(t) for t in tokens], holdout)
    return [t for i, t in enumerate(tokens) if i not in out], [t for i, t in enumerate(tokens) if i in out]
