"""What training on conversations teaches beside words: the token that ends a turn, and the template that wrote it.

Both belong into what is published. A base model's files say that a text ends in <|endoftext|>; one that was taught
turns ends them in <|im_end|>, and whoever generates has to stop there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .chat import CHATML
from .loader import TextDataLoader, stores_of
from .tokenizer import TrainingTokenizer, training_tokenizer
from .tokens import TokenStore

__all__ = ["Taught", "taught"]

LOOKED_AT = 1000
"""Documents of a source whose turns are looked at."""


@dataclass(frozen=True)
class Taught:
    """What a run's data teach."""

    end_of_turn: int | None = None
    """The token that ends every learned turn. None: the data have no turns, or turns end in different tokens."""
    template: str | None = None
    """The chat template that conversations were written with, where the tokenizer's folder has none."""


def taught(config: Any, tokenizer: Any) -> Taught:
    """Return what a dataloader's data teach; nothing for data without conversations or of another loader."""
    if not isinstance(config, TextDataLoader.Config) or not any(source.is_chat for source in config.all_sources()):
        return Taught()
    ends: set[int] = set()
    for source, store in stores_of(config, tokenizer):
        if source.is_chat:
            ends |= _ends_of_turns(store)
    mine = training_tokenizer(tokenizer)
    own = mine.templates if isinstance(mine, TrainingTokenizer) else {}
    bare = not own or own == {"default": CHATML}
    return Taught(ends.pop() if len(ends) == 1 else None, CHATML if bare else None)


def _ends_of_turns(store: TokenStore) -> set[int]:
    """The last token of each learned turn of the store's first documents."""
    until = int(store.ends_N[min(LOOKED_AT, len(store)) - 1])
    assert store.learned_T is not None
    learned_T, ends_N = np.asarray(store.learned_T[:until]), store.ends_N[:LOOKED_AT]
    last_T = learned_T & ~np.append(learned_T[1:], False)
    last_T[ends_N - 1] |= learned_T[ends_N - 1]
    return set(np.unique(store.tokens_T[:until][last_T]).tolist())
