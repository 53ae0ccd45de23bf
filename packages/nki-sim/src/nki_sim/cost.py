"""What an instruction costs: documented formulas, and knobs for what is not documented. Modelled, never measured.

[C] "Estimated instruction cost" of the October 2025 API pages (aws-neuron-sdk 1db4d74, nki/api/nki/isa/__init__.py; dropped
at NKI 0.2, and no other figures exist). [A] Trainium2 architecture guide (81ce03a): Vector Engine performance mode, transpose
mode, DMA transpose, DGE. [D] DMA bandwidth guide (81ce03a).
"""

from collections.abc import Callable
from dataclasses import dataclass

from nki_sim.constants import matmul_perf_mode
from nki_sim.limits import DMA_BYTES_PER_NS, DMA_ENGINES, GHZ, PARTITIONS
from nki_sim.program import Instr
from nki_sim.tensor import MemoryRegion, NkiTensor

GPSIMD_OWN = ("iota", "affine_select", "nc_n_gather", "nonzero_with_count", "tensor_partition_reduce")
REDUCING = ("activation", "activation_reduce", "tensor_scalar_reduce")
HALF = ("bfloat16", "float16")
SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum


@dataclass(frozen=True)
class Model:
    """The assumptions. Change one with dataclasses.replace and hand it to report()."""

    min_cycles: float = 64  # [C] MIN_II, "roughly 64"
    gpsimd_start: float = 150  # [C] "roughly 150"
    dynamic_cycles: float = 600  # [C] MIN_II_DYNAMIC: a run-time address in a compute instruction
    vector_modes: bool = True  # [A] 2x and 4x for bfloat16 and float16
    # fitted: cycles of an element of tensor_tensor and scalar_tensor_tensor, both operands in SBUF; [C], of Trn1's time, says 2
    two_sbuf_cycles: float = 1.3
    fp32_transpose: float = 2  # [A] half of float32's four passes
    dma_latency_ns: float = 1300  # [D] from semaphore to start
    dma_engines: float = DMA_ENGINES  # [D] of a core while the chip's other cores are busy
    # fitted: 400 GB/s of a core alone on its chip. Published 780 to 820 GB/s of "one core" are of a pair (sim_calibration.py)
    lone_dma_engines: float = 400 / DMA_BYTES_PER_NS
    descriptor_ns: float = 60  # overhead of a descriptor; with `descriptor_power`, the curve of [D]'s four ranges
    descriptor_power: float = 2  # ns of a descriptor: (overhead^p + (bytes / rate)^p)^(1/p)
    hwdge_ns: float = 600  # [A] issue of one hardware-generated DMA, on the Sync Engine unless told otherwise
    swdge_ns: float = 0  # per descriptor on GpSimd; no figure is published
    transpose_efficiency: float = 0.9  # [A] DMA transpose from HBM, up to
    transpose_efficiency_sbuf: float = 0.5  # [A] from SBUF, up to
    compute_traffic: float = 2  # assumed: dma_compute moves its destination twice
    loop_ns: float = 35_000  # field notes: 30 to 37 us of synchronisation for each time a device loop is run
    loop_drains: bool = True  # field notes: what follows a device loop waits for all that is in it, on every engine
    weight_cycles: float = 64  # [A] a stationary tile, loaded behind the matmul before it or else exposed
    reorder: int = (
        64  # assumed: instructions of an engine among which the compiler's scheduler starts the first that can
    )
    barrier_ns: float = 1300  # assumed: as a semaphore across engines [D]


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of an instruction on its engine (DMA: on the sixteen DMA engines), and what to count."""

    ns: float
    useful_ns: float = 0  # Tensor Engine: multiply-accumulates asked for, at full rate
    transpose_ns: float = 0  # Tensor Engine
    bytes: int = 0
    descriptors: int = 0
    direction: str = ""
    issue: tuple[str, float] | None = None  # engine that generates descriptors, ns
    weights_ns: float = 0  # Tensor Engine: loading the stationary tile, unless another matmul hides it


def _all(i: Instr, *dtypes: str) -> bool:
    return all(v.dtype in dtypes for v in (*i.reads, *i.writes))


def _ops(i: Instr, *names: str) -> bool:
    return [i.args[k].name for k in ("op", "op0", "op1") if k in i.args] == list(names)


def _streamed(m: Model, i: Instr, n: float) -> float:
    """tensor_copy and tensor_scalar; [A] the Vector Engine's performance mode."""
    views = (i.writes[0], i.reads[0])
    if not m.vector_modes or i.engine != "vector" or any(v.dtype not in HALF for v in views):
        return n
    end_to_end = all(v.strides[-1] == 1 or v.shape[-1] == 1 for v in views)
    in_psum = sum(v.buffer is PSUM for v in views)
    return n / {(0, True): 4, (0, False): 2, (1, True): 2}.get((in_psum, end_to_end), 1)


def _tensor_tensor(m: Model, i: Instr, n: float) -> float:
    in_sbuf = all(v.buffer is SBUF for v in i.reads)
    if in_sbuf and _all(i, *HALF):
        return n / 2 if m.vector_modes and i.engine == "vector" else n
    return m.two_sbuf_cycles * n if in_sbuf else n


def _gather(m: Model, i: Instr, n: float) -> float:
    e, size = i.args["num_elem_per_idx"], i.args["src_buffer"].dtype.itemsize
    return m.gpsimd_start + n * min(4 / size, e) * 4 * e / (28 + 4 * e)


# Cycles of the engine for n elements per partition, at least MIN_II; [C] but for the Vector Engine's modes. Others: n.
CYCLES: dict[str, Callable[[Model, Instr, float], float]] = {
    "tensor_copy": _streamed,
    "tensor_scalar": _streamed,
    "tensor_tensor": _tensor_tensor,
    "tensor_reduce": lambda m, i, n: n / 2 if _all(i, "bfloat16") and (_ops(i, "add") or _ops(i, "maximum")) else n,
    "scalar_tensor_tensor": lambda m, i, n: (
        n if _all(i, "bfloat16") and _ops(i, "subtract", "multiply") else m.two_sbuf_cycles * n
    ),
    "tensor_copy_predicated": lambda m, i, n: n if any(v.buffer is PSUM for v in i.reads) else 2 * n,
    "memset": lambda m, i, n: n / 2 if _all(i, *HALF) and i.args["value"] == 0 else n,
    "reciprocal": lambda m, i, n: 8 * n,
    "tensor_tensor_scan": lambda m, i, n: 2 * n,
    "bn_aggr": lambda m, i, n: 13 * n / 3,
    **dict.fromkeys(REDUCING, lambda m, i, n: max(n, m.min_cycles) + m.min_cycles * (i.args["reduce_res"] is not None)),
    **dict.fromkeys(GPSIMD_OWN, lambda m, i, n: m.gpsimd_start + n),
    "local_gather": _gather,
}


def cost(i: Instr, m: Model) -> Cost:
    """The modelled cost of one instruction."""
    if i.op == "core_barrier" or i.engine == "sync":
        return Cost(m.barrier_ns if i.op == "core_barrier" else m.min_cycles / GHZ["sync"])
    if i.engine in ("dma", "tensor"):
        return _dma(i, m) if i.engine == "dma" else _tensor(i, m)
    n = max(v.free_size for v in (*i.reads, *i.writes))
    cycles = CYCLES[i.op](m, i, n) if i.op in CYCLES else n
    least = m.dynamic_cycles if any(v.is_indirect() for v in (*i.reads, *i.writes)) else m.min_cycles
    return Cost(max(least, cycles) / GHZ[i.engine])


def _tensor(i: Instr, m: Model) -> Cost:
    wide, ghz = i.reads[0].dtype == "float32", GHZ["tensor"]
    turned = i.op == "nc_transpose" or i.args["is_transpose"]
    if i.op == "nc_transpose":
        k, rows, columns = i.reads[0].shape[0], i.reads[0].free_size, i.reads[0].shape[0]
    else:
        double = i.args["perf_mode"] is matmul_perf_mode.double_row
        k, rows, columns = i.reads[0].shape[0], *(v.free_size // (1 + double) for v in i.reads)
    ns = max(min(64, rows), columns) * ((m.fp32_transpose if turned else 4) if wide else 1) / ghz
    weights = m.weight_cycles / ghz
    if turned:
        return Cost(ns, transpose_ns=ns, weights_ns=weights)
    return Cost(ns, useful_ns=k * rows * columns / PARTITIONS**2 * (4 if wide else 1) / ghz, weights_ns=weights)


def run_bytes(view: NkiTensor) -> int:
    """Bytes that lie end to end in memory from each start: what one descriptor can move."""
    run, skip = 1, 1 if view.buffer.on_chip or view.by_row else 0
    for stride, n in reversed(list(zip(view.strides[skip:], view.shape[skip:], strict=True))):
        if n > 1 and stride != run:
            break
        run *= n
    return run * view.dtype.itemsize


def descriptor_ns(size: float, m: Model) -> float:
    """Nanoseconds that a DMA engine takes for one descriptor of `size` bytes: an overhead below 256 B, its rate from 4 KiB on."""
    return float(
        (m.descriptor_ns**m.descriptor_power + (size / DMA_BYTES_PER_NS) ** m.descriptor_power)
        ** (1 / m.descriptor_power)
    )


def _dma(i: Instr, m: Model) -> Cost:
    views = (*i.reads, *i.writes)
    size = max(v.size * v.dtype.itemsize for v in views)
    source = i.reads[-1] if i.op == "dma_compute" else i.reads[0]
    start, end = ("sbuf" if v.buffer.on_chip else "hbm" for v in (source, i.writes[0]))
    each = 512 if i.op == "dma_transpose" else min(run_bytes(v) for v in views)
    count = -(-size // each)
    if i.op == "dma_transpose":
        efficiency = m.transpose_efficiency if start == "hbm" else m.transpose_efficiency_sbuf
        ns = size / (DMA_BYTES_PER_NS * m.dma_engines * efficiency)
    else:
        ns = max(count / m.dma_engines, 1) * descriptor_ns(each, m)
        ns *= m.compute_traffic if i.op == "dma_compute" else 1
    issue: tuple[str, float] | None = None
    mode = getattr(i.args.get("dge_mode"), "name", "unknown")
    if mode == "swdge" or any(v.by_row for v in views):
        issue = ("gpsimd", count * m.swdge_ns)
    elif mode == "hwdge" or any(v.is_indirect() for v in views):
        issue = ("scalar" if getattr(i.args.get("engine"), "name", "") == "scalar" else "sync", m.hwdge_ns)
    return Cost(ns, bytes=size, descriptors=count, direction=f"{start}->{end}", issue=issue)
