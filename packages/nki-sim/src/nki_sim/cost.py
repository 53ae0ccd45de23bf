"""What an instruction costs: documented formulas, and knobs for what is not documented. Modelled, never measured.

[C] "Estimated instruction cost" of the October 2025 API pages (aws-neuron-sdk 1db4d74, nki/api/nki/isa/__init__.py; dropped
at NKI 0.2, and no other figures exist). [A] Trainium2 architecture guide (81ce03a): Vector Engine performance mode, transpose
mode, DMA transpose, DGE. [D] DMA bandwidth guide (81ce03a).
N is elements per partition; times are in cycles of the engine (limits.GHZ).
"""

from collections.abc import Callable
from dataclasses import dataclass

from nki_sim.constants import matmul_perf_mode
from nki_sim.limits import DMA_BYTES_PER_NS, DMA_ENGINES, GHZ, PARTITIONS
from nki_sim.program import Instr
from nki_sim.tensor import MemoryRegion, NkiTensor

__all__ = ["Cost", "Model", "cost"]

HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Model:
    """The assumptions. Change one with dataclasses.replace and hand it to report()."""

    min_cycles: float = 64  # [C] MIN_II, "roughly 64"
    gpsimd_start: float = 150  # [C] "roughly 150"
    dynamic_cycles: float = 600  # [C] MIN_II_DYNAMIC: a run-time address in a compute instruction
    vector_modes: bool = True  # [A] 2x and 4x for bfloat16 and float16
    fp32_transpose: float = 2  # [A] half of float32's four passes
    dma_latency_ns: float = 1300  # [D] from semaphore to start
    descriptor_ns: float = 512 / DMA_BYTES_PER_NS  # assumed: a descriptor below 512 B costs as much as one of 512 B
    hwdge_ns: float = 600  # [A] issue of one hardware-generated DMA, on the Sync Engine unless told otherwise
    swdge_ns: float = 0  # per descriptor on GpSimd; no figure is published
    transpose_efficiency: float = 0.9  # [A] DMA transpose from HBM, up to
    transpose_efficiency_sbuf: float = 0.5  # [A] from SBUF, up to
    compute_traffic: float = 2  # dma_compute moves its destination twice
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


def _n(i: Instr) -> int:
    return max(v.free_size for v in (*i.reads, *i.writes))


def _plain(m: Model, i: Instr) -> float:
    return max(m.min_cycles, _n(i))


def _mode(i: Instr) -> float:
    """[A] Vector Engine performance mode of tensor_copy and tensor_scalar."""
    views = (i.writes[0], i.reads[0])
    if i.engine != "vector" or any(v.dtype not in HALF for v in views):
        return 1
    psum = sum(v.buffer is MemoryRegion.psum for v in views)
    contiguous = all(v.strides[-1] == 1 or v.shape[-1] == 1 for v in views)
    return (4 if contiguous else 2) if psum == 0 else 2 if psum == 1 and contiguous else 1


def _streamed(m: Model, i: Instr) -> float:
    return max(m.min_cycles, _n(i) / (_mode(i) if m.vector_modes else 1))


def _tensor_tensor(m: Model, i: Instr) -> float:
    a, b = i.reads[:2]
    half = all(v.dtype in HALF for v in (a, b, i.writes[0]))
    both_sbuf = a.buffer is b.buffer is MemoryRegion.sbuf
    if half and both_sbuf and m.vector_modes and i.engine == "vector":
        return max(m.min_cycles, _n(i) / 2)
    return max(m.min_cycles, _n(i) * (1 if not both_sbuf or half else 2))


def _tensor_reduce(m: Model, i: Instr) -> float:
    fast = all(v.dtype == "bfloat16" for v in (i.reads[0], i.writes[0])) and i.args["op"].name in ("add", "maximum")
    return max(m.min_cycles, _n(i) / (2 if fast else 1))


def _scalar_tensor_tensor(m: Model, i: Instr) -> float:
    fast = (i.args["op0"].name, i.args["op1"].name) == ("subtract", "multiply")
    fast = fast and all(i.args[k].dtype == "bfloat16" for k in ("data", "operand1"))
    return max(m.min_cycles, _n(i) * (1 if fast else 2))


def _predicated(m: Model, i: Instr) -> float:
    return max(m.min_cycles, _n(i) * (1 if any(v.buffer is MemoryRegion.psum for v in i.reads) else 2))


def _memset(m: Model, i: Instr) -> float:
    fast = i.writes[0].dtype in HALF and i.args["value"] == 0
    return max(m.min_cycles, _n(i) / (2 if fast else 1))


def _local_gather(m: Model, i: Instr) -> float:
    e, size = i.args["num_elem_per_idx"], i.args["src_buffer"].dtype.itemsize
    c = ((28 + 4 * e) / (4 * e)) / min(4 / size, e)
    return m.gpsimd_start + i.writes[0].free_size / c


def _gpsimd(m: Model, i: Instr) -> float:
    return m.gpsimd_start + _n(i)


def _times(factor: float) -> Callable[[Model, Instr], float]:
    return lambda m, i: max(m.min_cycles, factor * _n(i))


def _reducing(m: Model, i: Instr) -> float:
    return _plain(m, i) + (m.min_cycles if i.args.get("reduce_res") is not None else 0)


CYCLES: dict[str, Callable[[Model, Instr], float]] = {
    "tensor_copy": _streamed,
    "tensor_scalar": _streamed,
    "tensor_tensor": _tensor_tensor,
    "tensor_reduce": _tensor_reduce,
    "scalar_tensor_tensor": _scalar_tensor_tensor,
    "tensor_copy_predicated": _predicated,
    "memset": _memset,
    "reciprocal": _times(8),
    "tensor_tensor_scan": _times(2),
    "bn_aggr": _times(13 / 3),
    "activation": _reducing,
    "activation_reduce": _reducing,
    "tensor_scalar_reduce": _reducing,
    "local_gather": _local_gather,
    **dict.fromkeys(("iota", "affine_select", "nc_n_gather", "nonzero_with_count", "tensor_partition_reduce"), _gpsimd),
}


def cost(i: Instr, m: Model) -> Cost:
    """The modelled cost of one instruction."""
    if i.engine == "dma":
        return _dma(i, m)
    if i.op in ("core_barrier", "sendrecv"):
        return Cost(m.barrier_ns)
    if i.engine == "sync":
        return Cost(m.min_cycles / GHZ["sync"])
    if i.engine == "tensor":
        return _matmul(i, m)
    cycles = CYCLES.get(i.op, _plain)(m, i)
    if any(v.is_indirect() for v in (*i.reads, *i.writes)):
        cycles = max(cycles, m.dynamic_cycles)
    return Cost(cycles / GHZ[i.engine])


def _matmul(i: Instr, m: Model) -> Cost:
    wide = i.reads[0].dtype == "float32"
    if i.op == "nc_transpose":
        p, f = i.reads[0].shape[0], i.reads[0].free_size
        ns = max(p, min(64, f)) * (m.fp32_transpose if wide else 1) / GHZ["tensor"]
        return Cost(ns, transpose_ns=ns)
    double = i.args["perf_mode"] is matmul_perf_mode.double_row
    stationary, moving = i.args["stationary"], i.args["moving"]
    rows, columns = stationary.free_size // (1 + double), moving.free_size // (1 + double)
    turn = i.args["is_transpose"]
    cycles = max(min(64, rows), columns) * ((m.fp32_transpose if turn else 4) if wide else 1)
    ns = cycles / GHZ["tensor"]
    if turn:
        return Cost(ns, transpose_ns=ns)
    filled = stationary.shape[0] * rows * columns / (PARTITIONS * PARTITIONS) * (4 if wide else 1)
    return Cost(ns, useful_ns=filled / GHZ["tensor"])


def run_bytes(view: NkiTensor) -> int:
    """Bytes that lie end to end in memory from each start: what one descriptor can move."""
    run, expected = 1, 1
    vector = view.indirect_index is not None and view.indirect_index.kind == "vector"
    skip = 1 if view.buffer.on_chip or vector else 0
    for stride, n in reversed(list(zip(view.strides[skip:], view.shape[skip:], strict=True))):
        if n > 1 and stride != expected:
            break
        run *= n
        expected *= n
    return run * view.dtype.itemsize


def _dma(i: Instr, m: Model) -> Cost:
    views = (*i.reads, *i.writes)
    size = max(v.size * v.dtype.itemsize for v in views)
    source = i.reads[-1] if i.op == "dma_compute" else i.reads[0]
    places = ["sbuf" if v.buffer.on_chip else "hbm" for v in (source, i.writes[0])]
    rate = DMA_BYTES_PER_NS * DMA_ENGINES
    if i.op == "dma_transpose":
        efficiency = m.transpose_efficiency if places[0] == "hbm" else m.transpose_efficiency_sbuf
        count, ns = max(1, size // 512), size / (rate * efficiency)
    else:
        each = min(run_bytes(v) for v in views)
        count = -(-size // each)
        ns = -(-count // DMA_ENGINES) * max(each / DMA_BYTES_PER_NS, m.descriptor_ns)
        ns *= m.compute_traffic if i.op == "dma_compute" else 1
    issue: tuple[str, float] | None = None
    mode = getattr(i.args.get("dge_mode"), "name", "unknown")
    vector = any(v.indirect_index is not None and v.indirect_index.kind == "vector" for v in views)
    if vector or mode == "swdge":
        issue = ("gpsimd", count * m.swdge_ns)
    elif mode == "hwdge" or any(v.is_indirect() for v in views):
        issue = ("scalar" if getattr(i.args.get("engine"), "name", "") == "scalar" else "sync", m.hwdge_ns)
    return Cost(ns, bytes=size, descriptors=count, direction=f"{places[0]}->{places[1]}", issue=issue)
