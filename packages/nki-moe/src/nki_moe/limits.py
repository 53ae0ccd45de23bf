"""What the kernels can do, answered without running them: nki_moe.check(...) and nki_moe.check_rope(...).

The SBUF that each kernel needs, and how far F and D are split so that it suffices. hardware.py has the sizes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from nki_moe.hardware import BYTES, D_SLICE, SBUF_BYTES, TILE, P

__all__ = ["Fit", "Split", "check", "check_rope", "logical_cores"]

MAX_EXPERTS = 512  # a launch's tables stay small; Qwen3 has 128


class Split(NamedTuple):
    """The numbers of parts into which F and D are cut, so that SBUF holds the weights of one part.

    `whole` means that it holds an expert at once, and that there is one pass.
    """

    f_splits: int
    d_splits: int
    whole: bool


class SumSplit(NamedTuple):
    """The numbers of parts into which a core's share of F is cut, so that SBUF holds its sums; and F of experts of one
    tile, which need no sums; and D.
    """

    f_splits: int
    f_splits_alone: int
    d_splits: int


@dataclass(frozen=True)
class Fit:
    """How a shape runs: cores of a logical NeuronCore, each kernel's splits, and the most SBUF bytes per partition."""

    lnc: int
    forward: Split
    backward_data: Split
    backward_weights: SumSplit
    sbuf_bytes: int


def check(rows: int, experts: int, hidden: int, dim: int, *, dtype: object = "bfloat16", lnc: int | None = None) -> Fit:
    """Say how the expert kernels run x (rows, dim) with w1 (experts, hidden, dim).

    Args:
        rows: rows of x; any number is valid, and for none nothing is launched.
        experts: experts on this core.
        hidden: hidden size F of an expert.
        dim: model size D.
        dtype: a torch dtype or its name, bfloat16 or float32.
        lnc: physical cores of a logical NeuronCore; the environment's (logical_cores) unless given.

    Returns:
        Into how many parts each kernel cuts its work, and the SBUF that it needs.

    Raises:
        ValueError: the shape does not run, with the nearest sizes that do.
    """
    lnc = logical_cores() if lnc is None else lnc
    if lnc not in (1, 2):
        raise ValueError(f"lnc={lnc}: a logical NeuronCore is 1 or 2 physical ones")
    name = str(dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ValueError(f"dtype {name}: the kernels take {' or '.join(BYTES)}, the same for rows and weights")
    if rows < 0:
        raise ValueError(f"{rows} rows: there cannot be fewer than none")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{experts} experts: 1 to {MAX_EXPERTS} on one core; shard more by expert parallelism")
    unit = P * lnc
    for what, size in (("hidden (F)", hidden), ("dim (D)", dim)):
        if size < unit or size % unit:
            low, high = size // unit * unit, max(-(-size // unit), 1) * unit
            near = f"{low} or {high}" if low > 0 else f"{high}"
            raise ValueError(
                f"{what} {size}: must be a multiple of {unit} (128 partitions on each of {lnc} cores); nearest: "
                f"{near}. "
                + ("LNC=1 halves the unit. " if lnc == 2 else "")
                + "Tensor parallelism divides F; choose a degree that leaves a multiple"
            )
    b = BYTES[name]
    D, F = dim // P, hidden // P  # blocks of 128
    tables = 80 * experts + 4096  # tiling.py's, and what is small
    gathered = dim * b if b == 4 else 0  # float32 rows are gathered before they are transposed

    # Bytes per partition with f blocks of F's weights and d of D's at hand: weights, a tile's input, what is computed
    # from it.
    def forward_f(f: int, d: int) -> int:  # with room for a tail and a full tile where the whole expert is
        tile = max(D * TILE * b * (2 if d else 1), dim * b)
        return 2 * D * f * P * b + d * F * P * b + tile + max(gathered, 3 * f * TILE * b + 2 * TILE * 4 + out(d))

    def forward_d(d: int) -> int:
        return F * d * P * b + max(F * TILE * b + out(d), hidden * b)

    def data_f(f: int, d: int) -> int:
        tile, work = (D + 3 * f) * TILE * b * (2 if d else 1), 2 * f * TILE * b + 7 * TILE * 4
        return D * f * P * b + 2 * d * F * P * b + tile + max(gathered, work + out(d))

    def data_d(d: int) -> int:
        return 2 * F * d * P * b + 2 * F * TILE * b + out(d)

    def out(d: int) -> int:  # a slice of D, of all blocks of a tile
        return min(d, D_SLICE // P) * TILE * b

    def one(f: int, d: int) -> int:
        return (2 * d + 3 * f) * TILE * b + 2 * max(d, f) * P * b

    def several(f: int, d: int) -> int:
        return (2 * d + 3 * f) * TILE * b + max(d, f) * P * b + 3 * f * P * d * 4

    where = f"D={dim} F={hidden} {name} at LNC={lnc}"
    used = []

    def fewest(kernel: str, blocks: int, need: Callable[[int], int]) -> int:
        """The fewest parts of so many blocks that fit."""
        for n in (n for n in range(1, blocks + 1) if blocks % n == 0):
            if tables + need(blocks // n) <= SBUF_BYTES:
                used.append(tables + need(blocks // n))
                return n
        raise ValueError(
            f"{where}, {kernel}, needs {tables + need(1)} bytes of SBUF per partition however it is split; there are "
            f"{SBUF_BYTES}. Shard D or F (tensor parallelism), or use LNC=2 or bfloat16"
        )

    def split(kernel: str, need_f: Callable[[int, int], int], need_d: Callable[[int], int]) -> Split:
        if tables + need_f(F, D) <= SBUF_BYTES:
            used.append(tables + need_f(F, D))
            return Split(1, 1, True)
        return Split(fewest(kernel, F, lambda f: need_f(f, 0)), fewest(kernel, D, need_d), False)

    forward, data = split("forward", forward_f, forward_d), split("backward for the data", data_f, data_d)
    kernel = "backward for the weights"
    d_splits = fewest(kernel, D, lambda d: max(several(1, d), one(1, d)))
    sums = fewest(kernel, F // lnc, lambda f: several(f, D // d_splits))
    weights = SumSplit(sums, fewest(kernel, F, lambda f: one(f, D // d_splits)), d_splits)
    return Fit(lnc, forward, data, weights, max(used))


def check_rope(rows: int, head_dim: int, *, dtype: object = "bfloat16", lnc: int | None = None) -> None:
    """Raise unless the RoPE kernel takes these heads.

    Args:
        rows: tokens, batch x length.
        head_dim: size of a head.
        dtype: a torch dtype or its name, bfloat16 or float32.
        lnc: physical cores of a logical NeuronCore; the environment's (logical_cores) unless given.

    Raises:
        ValueError: the shape does not run, with the nearest sizes that do.
    """
    lnc = logical_cores() if lnc is None else lnc
    name = str(dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ValueError(f"dtype {name}: the RoPE kernel takes {' or '.join(BYTES)}")
    if head_dim % 2 or not 2 <= head_dim <= 512:
        raise ValueError(
            f"head_dim {head_dim}: must be even and at most 512; nearest: {max(2, min(512, head_dim // 2 * 2))}"
        )
    if rows < 0 or rows % lnc:
        raise ValueError(f"{rows} tokens: must be a multiple of LNC={lnc}; nearest: {max(0, -(-rows // lnc)) * lnc}")


def logical_cores() -> int:
    """Physical cores of a logical NeuronCore here: NEURON_LOGICAL_NC_CONFIG, or Trainium2's default of 2."""
    value = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")
    if value not in ("1", "2"):
        raise ValueError(f"NEURON_LOGICAL_NC_CONFIG={value!r}: must be 1 or 2, and agree with the compiler's --lnc")
    return int(value)
