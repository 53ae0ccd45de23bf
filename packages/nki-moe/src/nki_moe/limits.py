"""What the kernels can do, answered without running them: nki_moe.check(rows, experts, hidden, dim) and check_rope(...).

Facts of Trainium2 with their sources; the SBUF budget of each kernel; and how far F and D are split so that it holds.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Fit", "Split", "check", "check_rope", "logical_cores"]

SBUF_BYTES = (
    224 * 1024 - 16384 - 8 - 520
)  # per partition, less what compiler and runtime keep (nki-library d2ad3a5 plans so)
PARTITIONS = P = 128  # partitions of SBUF and PSUM
TILE = 512  # rows of a tile: a PSUM bank of float32, the widest matmul
MAX_EXPERTS = 512  # a launch's tables stay small; Qwen3 has 128
BYTES = {"bfloat16": 2, "float32": 4}


class Split(NamedTuple):
    """Into how many parts a core's share of F and of D is cut so that SBUF holds a kernel, and whether there is room to load ahead."""

    f_splits: int
    d_splits: int
    ahead: bool


@dataclass(frozen=True)
class Fit:
    """How a shape runs: cores of a logical NeuronCore, each kernel's splits, and the SBUF bytes per partition of the largest."""

    lnc: int
    forward: Split
    backward_data: Split
    backward_weights: Split
    sbuf_bytes: int


def check(rows: int, experts: int, hidden: int, dim: int, *, dtype: object = "bfloat16", lnc: int | None = None) -> Fit:
    """How the expert kernels run x (rows, dim) with w1 (experts, hidden, dim), or ValueError with the nearest valid sizes.

    Any number of rows is valid. dtype is a torch dtype or its name; lnc defaults to the environment's (logical_cores).
    """
    lnc = logical_cores() if lnc is None else lnc
    if lnc not in (1, 2):
        raise ValueError(f"lnc={lnc}: a logical NeuronCore is 1 or 2 physical ones")
    name = str(dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ValueError(f"dtype {name}: the kernels take {' or '.join(BYTES)}, the same for rows and weights")
    if rows < 1:
        raise ValueError(f"{rows} rows: there must be at least one")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{experts} experts: 1 to {MAX_EXPERTS} on one core; shard more by expert parallelism")
    unit = P * lnc
    for what, size in (("hidden (F)", hidden), ("dim (D)", dim)):
        if size < unit or size % unit:
            low, high = size // unit * unit, -(-size // unit) * unit
            near = " or ".join(str(n) for n in (low, high) if n)
            raise ValueError(
                f"{what} {size}: must be a multiple of {unit} (128 partitions on each of {lnc} cores); nearest: {near}. "
                + ("LNC=1 halves the unit. " if lnc == 2 else "")
                + "Tensor parallelism divides F; choose a degree that leaves a multiple"
            )
    b = BYTES[name]
    D, F = dim // P, hidden // P  # blocks of 128
    rows_twice = D * TILE * b if b == 4 else 0  # float32 rows are gathered before they are transposed

    # Bytes per partition: (what an expert occupies, what a tile occupies, the rest) for a share of f blocks of F, d of D.
    def forward_f(f: int) -> Need:
        return Need(2 * D * f * P * b, D * TILE * b + rows_twice, 3 * f * TILE * b + 2 * TILE * 4)

    def forward_d(d: int) -> Need:
        return Need(F * d * P * b, F * TILE * b, 4 * d * P * b)

    def data_f(f: int) -> Need:
        return Need(D * f * P * b, (D + 3 * f) * TILE * b + TILE * 4 + rows_twice, 2 * f * TILE * b + 6 * TILE * 4)

    def data_d(d: int) -> Need:
        return Need(2 * F * d * P * b, 2 * F * TILE * b, 4 * d * P * b)

    def weights_f(f: int) -> Need:
        return Need(0, (2 * D + 3 * f) * TILE * b, 3 * f * P * D * 4 + 2 * max(dim, f * P) * b)

    where = f"D={dim} F={hidden} {name} at LNC={lnc}"
    forward, most_1 = _split(where + ", forward", forward_f, F // lnc, forward_d, D // lnc)
    data, most_2 = _split(where + ", backward for the data", data_f, F // lnc, data_d, D // lnc)
    weights, most_3 = _split(where + ", backward for the weights", weights_f, F // lnc, None, 1)
    return Fit(lnc, forward, data, weights, max(most_1, most_2, most_3))


class Need(NamedTuple):
    """SBUF bytes per partition of one expert's weights, of one tile's input, and of everything else."""

    expert: int
    tile: int
    rest: int

    def total(self, ahead: bool) -> int:
        return (1 + ahead) * (self.expert + self.tile) + self.rest + 1024  # 1024: tables and counters


def _split(
    where: str, need_f: Callable[[int], Need], f: int, need_d: Callable[[int], Need] | None, d: int
) -> tuple[Split, int]:
    """The fewest splits that fit; of those, with room to load ahead if there is. And the bytes used."""

    def fewest(need: Callable[[int], Need], blocks: int) -> int:
        for n in range(1, blocks + 1):
            if blocks % n == 0 and need(blocks // n).total(ahead=False) <= SBUF_BYTES:
                return n
        raise ValueError(
            f"{where} needs {need(1).total(ahead=False)} bytes of SBUF per partition however it is split; there are {SBUF_BYTES}. "
            "Shard D or F (tensor parallelism), or use LNC=2 or bfloat16"
        )

    n_f, n_d = fewest(need_f, f), fewest(need_d, d) if need_d else 1
    needs = [need_f(f // n_f)] + ([need_d(d // n_d)] if need_d else [])
    ahead = all(need.total(ahead=True) <= SBUF_BYTES for need in needs)
    return Split(n_f, n_d, ahead), max(need.total(ahead) for need in needs)


def check_rope(rows: int, head_dim: int, *, dtype: object = "bfloat16", lnc: int | None = None) -> None:
    """ValueError, with the nearest valid sizes, unless the RoPE kernel takes `rows` tokens (batch x length) of such heads."""
    lnc = logical_cores() if lnc is None else lnc
    name = str(dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ValueError(f"dtype {name}: the RoPE kernel takes {' or '.join(BYTES)}")
    if head_dim % 2 or not 2 <= head_dim <= 512:
        raise ValueError(
            f"head_dim {head_dim}: must be even and at most 512; nearest: {max(2, min(512, head_dim // 2 * 2))}"
        )
    if rows < 1 or rows % lnc:
        raise ValueError(
            f"{rows} tokens: must be a positive multiple of LNC={lnc}; nearest: {max(1, -(-rows // lnc)) * lnc}"
        )


def logical_cores() -> int:
    """Physical cores of a logical NeuronCore here: NEURON_LOGICAL_NC_CONFIG, or Trainium2's default of 2."""
    value = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")
    if value not in ("1", "2"):
        raise ValueError(f"NEURON_LOGICAL_NC_CONFIG={value!r}: must be 1 or 2, and agree with the compiler's --lnc")
    return int(value)
