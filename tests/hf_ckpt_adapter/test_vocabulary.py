"""Contract of vocabulary.py: rows past the vocabulary are cut only when they hold nothing, or when one says so. (Case
214.)"""

from pathlib import Path

import pytest
import torch
from hf_ckpt_adapter import CheckpointReader, Options, convert_checkpoint
from hf_tiny import config, state, write_hub
from safetensors.torch import load_file

EMBED = "model.embed_tokens.weight"


def with_rows(folder: Path, value: float) -> Path:
    """TINY-D with 8 rows more than its config says."""
    tensors = state(config())
    for name in (EMBED, "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.full((8, 64), value)])
    return write_hub(folder, config(), tensors)


def test_rows_that_were_trained_are_not_taken_for_padding(tmp_path: Path) -> None:
    hub, words = with_rows(tmp_path / "hub", 0.5), r"8 rows more than the vocab_size 320.*fit_config.*trim_vocab"
    for layout in ("native", "per-expert"):
        with pytest.raises(ValueError, match=words):
            convert_checkpoint(hub, tmp_path / "out", layout)
    with pytest.raises(ValueError, match=words):
        CheckpointReader(hub, "native")
    assert not (tmp_path / "out").exists()
    for options, rows in ((Options(fit_config=True), 328), (Options(trim_vocab=True), 320)):
        convert_checkpoint(hub, tmp_path / str(rows), "per-expert", options=options)
        assert len(load_file(tmp_path / str(rows) / "model.safetensors")[EMBED]) == rows


def test_rows_of_zeros_are_padding(tmp_path: Path) -> None:
    report = convert_checkpoint(with_rows(tmp_path / "hub", 0.0), tmp_path / "out", "per-expert")
    assert report.trimmed == {EMBED: 8, "lm_head.weight": 8}
