"""What the kernels can do, answered without running them: nki_moe.check(...) and nki_moe.check_rope(...).

The SBUF that each kernel needs, and how many rows it can therefore work on at a time. hardware.py has the sizes.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from statistics import NormalDist

from nki_moe.hardware import BANK, BYTES, CHUNK, LOOP_PASSES, SBUF_BYTES, P

__all__ = ["Fit", "check", "check_rope", "data_columns", "logical_cores", "widest"]

MAX_EXPERTS = 512  # a launch's tables stay small; Qwen3 has 128
MAX_BLOCKS = 16  # of 128 rows in an item: beyond, weights are a few percent of the time


@dataclass(frozen=True)
class Fit:
    """How a shape runs.

    The cores of a logical NeuronCore, the blocks of 128 rows that are worked on at a time, the columns of F and rows
    of D for which a core holds sums at a time, and the SBUF bytes per partition of the loop that needs most.
    """

    lnc: int
    blocks: int
    f_share: int
    d_share: int
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
    # sizes that torch.compile made symbolic are fixed here
    return _plan(int(rows), int(experts), int(hidden), int(dim), name, lnc)


@lru_cache(maxsize=256)
def _plan(rows: int, experts: int, hidden: int, dim: int, dtype: str, lnc: int) -> Fit:
    """The number of blocks that is modelled as fastest, of those that fit SBUF and keep loops short enough."""
    size, found, least = BYTES[dtype], [], 0
    for blocks in range(1, MAX_BLOCKS + 1):
        used = max(_forward_bytes(hidden, dim, size, blocks), _backward_bytes(hidden, dim, size, blocks))
        shares = _shares(hidden, dim, lnc)
        needs = [(*share, max(used, _sum_bytes(*share, hidden, dim, size, blocks))) for share in shares]
        least = least or needs[-1][-1]
        items = rows // (blocks * P) + experts  # any routing of so many rows has at most as many
        fits = [need for need in needs if need[-1] <= SBUF_BYTES]
        if fits and items <= LOOP_PASSES:
            loops = max(hidden // lnc // fits[0][0], dim // lnc // fits[0][1])
            found.append((_cost(rows, experts, blocks, loops), Fit(lnc, blocks, *fits[0])))
    if found:
        return min(found, key=lambda f: f[0])[1]
    where = f"D={dim} F={hidden} {dtype} at LNC={lnc}"
    if least > SBUF_BYTES:
        raise ValueError(
            f"{where} needs {least} bytes of SBUF per partition however it is split; there are {SBUF_BYTES}. "
            "Shard D or F (tensor parallelism), or use LNC=2 or bfloat16"
        )
    raise ValueError(
        f"{where}, {rows} rows and {experts} experts: a device loop would run more than {LOOP_PASSES} times, which is "
        "not known to work. Call with fewer rows at a time"
    )


def _shares(hidden: int, dim: int, lnc: int) -> list[tuple[int, int]]:
    """Columns of F and rows of D whose sums are held at a time: from all of a core's to P of each."""
    f, d = hidden // lnc // P, dim // lnc // P

    def part(blocks: int, loops: int) -> int:
        return P * max(n for n in range(1, blocks + 1) if blocks % n == 0 and blocks // n >= min(loops, blocks))

    return list(dict.fromkeys((part(f, loops), part(d, loops)) for loops in range(1, max(f, d) + 1)))


def _cost(rows: int, experts: int, blocks: int, loops: int) -> float:
    """Time of forward and backward, in units of a block's matmuls of forward, for rows that are drawn alike.

    An expert then has about a normal number of them. Weights take as long to transpose as a block's matmuls, and
    longer to load.
    """
    mean = rows / experts
    deviation = sqrt(mean * (1 - 1 / experts))
    counts = [max(mean + deviation * NormalDist().inv_cdf((i + 0.5) / 20), 1) for i in range(20)]
    items = sum(ceil(n / (blocks * P)) for n in counts)
    sums = max(blocks, (0.8 + 0.4 * blocks) * loops)
    return items * (max(blocks * 1.07 + 1, 1.7 + 0.3 * blocks) + max(1.1 * blocks, 1.7 + 0.5 * blocks) + sums)


def _forward_bytes(F: int, D: int, size: int, blocks: int) -> int:
    """SBUF per partition of forward's loop: the item's rows, h, a group of weights, and what is worked on."""
    columns, tables = widest(F, BANK), 16 * blocks + 1024
    rows = (D + F) * blocks * size + D * size
    weights = max(2 * D // P * columns, F // P * CHUNK) + 4 * CHUNK
    return tables + rows + weights * size + (4 + 3 * size) * columns


def _backward_bytes(F: int, D: int, size: int, blocks: int) -> int:
    """The same of backward's loop over data, where two halves of the weights are there at most."""
    wide, tables = max(CHUNK, BANK), 32 * blocks + 1024
    rows = (D + 2 * F) * blocks * size + D * size
    columns = data_columns(F, D, size)
    work = (5 * size + 20) * widest(F, BANK) + columns * size
    return tables + rows + max(D // P * min(wide, F), 2 * (F // P) * columns) * size + work


def data_columns(F: int, D: int, size: int) -> int:
    """Columns of w1 and w3 that backward has in SBUF at once: all, if both matrices then take a quarter of SBUF."""
    return D if 2 * (F // P) * D * size <= SBUF_BYTES // 4 else min(CHUNK, D)


def _sum_bytes(f_share: int, d_share: int, F: int, D: int, size: int, blocks: int) -> int:
    """The same of backward's loop over sums."""
    sums = (2 * f_share // P * D + d_share // P * F) * 4
    return sums + blocks * (D + d_share + F + 2 * f_share) * size + 2 * max(D, F) * size + 16 * blocks + 1024


def widest(total: int, most: int) -> int:
    """The largest multiple of P up to `most` that divides `total`, itself a multiple of P."""
    return max(n for n in range(P, min(total, most) + 1, P) if total % n == 0)


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
