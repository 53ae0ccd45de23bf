"""Contract of options.py: an option that means nothing is refused."""

from typing import Any

import pytest
import torch
from hf_ckpt_adapter import Options


@pytest.mark.parametrize(
    "wrong",
    [
        {"experts": "stacked"},
        {"head": "yes"},
        {"on_untied": ""},
        {"max_shard_bytes": 0},
        {"pad_vocab_to": 0},
        {"dtype": torch.int8},
    ],
)
def test_an_option_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        Options(**wrong)
