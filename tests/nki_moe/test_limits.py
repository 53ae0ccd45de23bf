"""The contract: whether a shape runs is known before anything is compiled, with the numbers and the nearest valid ones;
and what check() says about memory is no less than what a traced kernel takes.
"""

import nki_moe
import pytest
import torch
from nki_moe import check, check_rope
from nki_moe.hardware import LOOP_PASSES, SBUF_BYTES, P
from nki_moe.tables import CLEARED, most_items

# D, F, experts: Qwen3-30B-A3B, Qwen3-235B-A22B, and what expert and tensor parallelism make of them.
QWEN3 = [(2048, 768, 128), (2048, 768, 16), (4096, 1536, 128), (4096, 1536, 8), (4096, 768, 32)]


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("D", "F", "E"), [*QWEN3, (6144, 2560, 160), (512, 256, 1), (6144, 256, 8)])
def test_every_qwen3_size_and_the_corners_fit(D: int, F: int, E: int, lnc: int) -> None:
    fit = check(32768, E, F, D, lnc=lnc)
    assert fit.lnc == lnc and 0 < fit.sbuf_bytes <= SBUF_BYTES


def test_sums_that_exceed_sbuf_are_split() -> None:
    small, large = check(4096, 16, 768, 2048, lnc=2), check(4096, 8, 1536, 4096, lnc=1)
    assert (small.f_share, small.d_share) == (384, 1024), "a core's share, in one loop"
    assert large.f_share < 1536 and 1536 % large.f_share == 0 and 4096 % large.d_share == 0


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("D", "F", "E"), QWEN3)
@pytest.mark.parametrize("rows", [1, 8192, 131072])
def test_no_loop_is_longer_than_what_is_known_to_work(D: int, F: int, E: int, rows: int, lnc: int) -> None:
    """Whatever the routing: an item for each full one, and one more for each expert."""
    fit = check(rows, E, F, D, lnc=lnc)
    assert most_items(rows, E, fit.blocks * P, 1) <= LOOP_PASSES == 2048
    assert -(-rows // P) / CLEARED <= LOOP_PASSES
    with pytest.raises(ValueError, match=r"more than 2048 times, .* Call with fewer rows"):
        check(2**24, E, F, D, lnc=lnc)


def test_an_expert_of_as_many_rows_as_the_mean_is_one_item_or_few() -> None:
    """128 experts of 256 rows each take three blocks, since half of them have a few rows more than two."""
    assert [check(rows, E, 768, 2048, lnc=2).blocks for rows, E in ((16384, 16), (32768, 128), (4096, 128))] == [
        9,
        3,
        1,
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 700}, r"hidden \(F\) 700: must be a multiple of 256 .* nearest: 512 or 768"),
        ({"hidden": 384}, "nearest: 256 or 512.*LNC=1 halves the unit"),
        ({"hidden": 96}, "nearest: 256"),
        ({"dim": 2000}, r"dim \(D\) 2000: .* nearest: 1792 or 2048"),
        ({"dtype": torch.float16}, "float16: the kernels take bfloat16 or float32"),
        ({"lnc": 3}, "lnc=3"),
        ({"experts": 513}, "1 to 512"),
        ({"rows": -1}, "-1 rows"),
        ({"hidden": 0}, "nearest: 256\\."),
        ({"dim": -5}, "nearest: 256\\."),
        ({"hidden": 512, "dim": 256 * 512}, "SBUF per partition"),
    ],
)
def test_what_does_not_run_is_refused_with_the_nearest_that_does(change: dict[str, object], words: str) -> None:
    arguments = {"rows": 4096, "experts": 16, "hidden": 768, "dim": 2048, "lnc": 2, **change}
    with pytest.raises(ValueError, match=words):
        check(**arguments)  # type: ignore[arg-type]


def test_hidden_384_runs_on_one_core() -> None:
    assert check(4096, 16, 384, 2048, lnc=1).lnc == 1


def test_lnc_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    assert check(1, 1, 256, 256).lnc == 2
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert check(1, 1, 256, 256).lnc == 1
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "4")
    with pytest.raises(ValueError, match="must be 1 or 2"):
        check(1, 1, 256, 256)


def test_rope_limits_name_the_nearest_valid() -> None:
    check_rope(4096, 128, lnc=2)
    check_rope(0, 128, lnc=2)
    with pytest.raises(ValueError, match="even and at most 512; nearest: 126"):
        check_rope(4096, 127, lnc=2)
    with pytest.raises(ValueError, match="multiple of LNC=2; nearest: 8"):
        check_rope(7, 128, lnc=2)


def test_the_operator_checks_before_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_MOE_BACKEND", "sim")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    w = torch.zeros(1, 96, 256)
    with pytest.raises(ValueError, match=r"hidden \(F\) 96"):
        nki_moe.grouped_mlp(torch.zeros(4, 256), torch.tensor([4]), w, w.mT.contiguous(), w)
