"""Contract of describe.py: what is in a checkpoint, and what is wrong with it, in words."""

from pathlib import Path

import pytest
from hf_tiny import config, run, state, write_hub


def test_inspect_reports_problems_and_values_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config()
    bad = state(cfg)
    bad["model.norm.weight"][:2] = float("nan")
    del bad["model.layers.1.self_attn.k_norm.weight"]
    write_hub(tmp_path / "bad", cfg, bad)
    code, facts = run(capsys, "inspect", tmp_path / "bad", "--values")
    assert code == 1 and len(facts["problems"]) == 2
    assert "k_norm" in facts["problems"][0] and "2 values that are not finite" in facts["problems"][1]


def test_a_few_norms_alone_are_described_with_what_they_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    norms = {n: t for n, t in state(config()).items() if "q_norm" in n}
    code, facts = run(capsys, "inspect", write_hub(tmp_path / "norms", config(), norms))
    assert code == 1 and "0 query rows" in facts["problems"][0]
