"""What the kernels can do, answered without running them: nki_moe.check(rows, experts, hidden, dim) and check_rope(...).

Facts of Trainium2 with their sources; the SBUF budget of each kernel; and how far F and D are split so that it holds.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Fit", "check", "check_rope", "logical_cores"]

SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520  # per partition, less what compiler and runtime keep (nki-library d2ad3a5 plans so)
P = 128  # partitions of SBUF and PSUM
TILE = 512  # rows of a tile: a PSUM bank of float32, the widest matmul
MAX_EXPERTS = 512  # a launch's tables stay small; Qwen3 has 128
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Fit:
    """How a shape runs: cores of a logical NeuronCore, (splits of F, splits of D) per core of each kernel, and the SBUF
    bytes per partition of the largest."""

    lnc: int
    forward: tuple[int, int]
    backward_data: tuple[int, int]
    backward_weights: tuple[int, int]
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
    f, d = F // lnc, D // lnc

    def forward_f(n: int) -> int:
        part = f // n
        return 2 * D * part * P * b + (D + 3 * part) * TILE * b + 2 * TILE * 4 + _gathered(dim, b)

    def backward_f(n: int) -> int:
        part = f // n
        return D * part * P * b + (D + 5 * part) * TILE * b + 6 * TILE * 4 + _gathered(dim, b)

    def weights_f(n: int) -> int:
        part = f // n
        return 3 * part * P * D * 4 + (2 * dim + 3 * part * P) * (TILE // P) * b + max(dim, part * P) * b

    def forward_d(n: int) -> int:
        return F * (d // n) * P * b + F * TILE * b + 4 * (d // n) * P * b

    def backward_d(n: int) -> int:
        return 2 * F * (d // n) * P * b + 2 * F * TILE * b + 4 * (d // n) * P * b

    splits, used = {}, 0
    for key, bytes_at, blocks in (
        ("forward F", forward_f, f),
        ("forward D", forward_d, d),
        ("backward_data F", backward_f, f),
        ("backward_data D", backward_d, d),
        ("backward_weights F", weights_f, f),
    ):
        n = _fewest_splits(bytes_at, blocks)
        if n is None:
            raise ValueError(
                f"{key}: D={dim} F={hidden} {name} at LNC={lnc} needs {bytes_at(blocks)} bytes of SBUF per partition even "
                f"when split {blocks} times; there are {SBUF_BYTES}. Shard D or F (tensor parallelism), use LNC=2 or bfloat16"
            )
        splits[key] = n
        used = max(used, bytes_at(n))
    return Fit(
        lnc,
        (splits["forward F"], splits["forward D"]),
        (splits["backward_data F"], splits["backward_data D"]),
        (splits["backward_weights F"], 1),
        used,
    )


def check_rope(head_dim: int, *, dtype: object = "bfloat16") -> None:
    """ValueError unless the RoPE kernel takes heads of this size."""
    name = str(dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ValueError(f"dtype {name}: the RoPE kernel takes {' or '.join(BYTES)}")
    if head_dim % 2 or not 2 <= head_dim <= 512:
        raise ValueError(f"head_dim {head_dim}: must be even and at most 512; nearest: {max(2, min(512, head_dim // 2 * 2))}")


def logical_cores() -> int:
    """Physical cores of a logical NeuronCore here: NEURON_LOGICAL_NC_CONFIG, or Trainium2's default of 2."""
    value = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")
    if value not in ("1", "2"):
        raise ValueError(f"NEURON_LOGICAL_NC_CONFIG={value!r}: must be 1 or 2, and agree with the compiler's --lnc")
    return int(value)


def _gathered(dim: int, b: int) -> int:
    """float32 rows are gathered before they are transposed; bfloat16 ones on the way."""
    return dim * (TILE // P) * b if b == 4 else 0


def _fewest_splits(bytes_at: Callable[[int], int], blocks: int) -> int | None:
    return next((n for n in range(1, blocks + 1) if blocks % n == 0 and bytes_at(n) <= SBUF_BYTES), None)
