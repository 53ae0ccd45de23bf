"""How wrong a modelled total may be: errors against published timings, by what bounds a kernel. From benchmarks/sim_calibration.py."""

from typing import NamedTuple

WIDE_BYTES = 2048  # of a descriptor: the least that AWS's DMA guide recommends


class Band(NamedTuple):
    """Median and 90th percentile of |modelled / measured - 1| over operators that the model was not fitted on."""

    median: float
    ninety: float
    points: int

    def __str__(self) -> str:
        words = f"error {self.median:.0%} in the median, {self.ninety:.0%} at the 90th percentile of {self.points} held-out points"
        return words if self.ninety <= 0.3 else f"not bounded: {words}"


BANDS = {
    "matmul": Band(0.031, 0.072, 12),
    "stream": Band(0.072, 0.134, 14),
    "small": Band(0.156, 1.076, 7),
}


def kind_of(busy_ns: dict[str, float], dma_bytes: int, descriptors: int) -> str:
    """A kernel's class: bound by the Tensor Engine; by DMA in wide descriptors; or small or strided, which is all else."""
    busiest = max(busy_ns, key=lambda engine: busy_ns[engine])
    if busiest == "tensor":
        return "matmul"
    return "stream" if descriptors and dma_bytes / descriptors >= WIDE_BYTES else "small"
