"""DMA: copies between HBM and SBUF with gather and scatter, read-modify-write, and transposition on the way."""

from typing import Any

import numpy as np

from nki_sim.constants import Engine, dge_mode, oob_mode
from nki_sim.dtypes import f32
from nki_sim.errors import need, refuse
from nki_sim.instruction import HBM, REQUIRED, SBUF, Args, Compute, Tile, instruction
from nki_sim.isa.vector import write_where
from nki_sim.limits import DMA_COMPUTE_SOURCES
from nki_sim.machine import Machine, Rows
from nki_sim.tensor import NkiTensor

Array = np.ndarray
IN, OUT = Tile(HBM | SBUF), Tile(HBM | SBUF, write=True)  # DMA does not reach PSUM
AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
SKIP = oob_mode.skip


def _need_index(view: NkiTensor) -> None:
    """A vector_offset is one integer for each row, in SBUF."""
    i = view.indirect_index.source
    good = isinstance(i, NkiTensor) and i.buffer in SBUF and (i.shape[0], i.free_size) == (view.shape[0], 1)
    good = good and i.dtype in ("int32", "uint32")
    need(good, "vector-offset", "vector_offset: SBUF ({}, 1) int32/uint32; got {}", view.shape[0], i)


def _index(machine: Machine, view: NkiTensor) -> Array:
    """The row numbers of an indirect view, column after column."""
    index = machine.read(view.indirect_index.source)
    return index.reshape(index.shape[0], -1).T.reshape(-1)[: view.shape[0]]


def _write_rows(machine: Machine, dst: NkiTensor, values: Array, rows: Rows, order: Any = None) -> None:
    """Write gathered rows, transposed by `order`; those skipped stay as they are."""
    order = order or range(values.ndim)
    valid = np.broadcast_to(rows.valid.reshape(-1, *(1,) * (values.ndim - 1)), values.shape)
    write_where(machine, dst, valid.transpose(order).reshape(dst.shape), values.transpose(order).reshape(dst.shape))


@instruction("D", special=True, dst=OUT, src=IN, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown, engine=Engine.unknown)  # fmt: skip
def dma_copy(a: Args) -> Compute:
    """dst = src, elements in order, converted through float32; gather or scatter when one side has a vector_offset."""
    dst, src, mode = a.dst, a.src, a.dge_mode.name
    need(a.priority is None, "target", "priority needs NeuronCore-v4 (Trn3); the target is trn2")
    need(dst.size == src.size, "shape", "dst {} has {} elements, src {} has {}", dst, dst.size, src, src.size)
    need(not (dst.by_row and src.by_row), "dma-mode", "a copy gathers or scatters, not both")
    hw = mode == "hwdge"
    need(not hw or dst.dtype == src.dtype, "dma-mode", "hwdge does not convert; got {} -> {}", src, dst)
    need(not hw or not (dst.by_row or src.by_row), "dma-mode", "hwdge does not gather or scatter; use swdge")
    fixed = not (dst.is_indirect() or src.is_indirect())
    need(mode != "none" or fixed, "dma-mode", "dge_mode.none fixes addresses beforehand; use swdge")
    free = a.engine is Engine.unknown or (hw and a.engine in (Engine.sync, Engine.scalar))
    need(free, "dma-mode", "engine is sync or scalar, and goes with dge_mode.hwdge; got {}, {}", a.engine, mode)
    for view in (dst, src):
        if view.by_row:
            _need_index(view)
    skip = a.oob_mode is SKIP

    def execute(machine: Machine) -> None:
        if src.by_row:
            rows = machine.rows(src, _index(machine, src), skip)
            _write_rows(machine, dst, machine.gather(src, rows), rows)
            return
        if machine.locate(src, skip) is None or (not dst.by_row and machine.locate(dst, skip) is None):
            return
        values = machine.read(src)
        values = values if src.dtype == dst.dtype else f32(values)
        if dst.by_row:
            machine.scatter(dst, machine.rows(dst, _index(machine, dst), skip), values)
        else:
            machine.write(dst, values)

    return execute


@instruction("D", special=True, dst=OUT, srcs=IN, reduce_op=REQUIRED, scales=None, unique_indices=True, oob_mode=oob_mode.error)  # fmt: skip
def dma_compute(a: Args) -> Compute:
    """dst = sum of srcs in float32. With a vector_offset: dst[rows] += src (scatter) or dst += src[rows] (gather)."""
    n, dst = len(a.srcs), a.dst
    need(getattr(a.reduce_op, "name", None) == "add", "op", "reduce_op must be nl.add; got {!r}", a.reduce_op)
    need(a.scales is None or all(float(s) == 1 for s in a.scales), "value", "scales must be 1.0; got {}", a.scales)
    need(1 <= n <= DMA_COMPUTE_SOURCES, "dma-sources", "{} sources; at most {}", n, DMA_COMPUTE_SOURCES)
    need(all(s.size == dst.size for s in a.srcs), "shape", "dst {} and srcs {} must match in size", dst, a.srcs)
    by_row = [v for v in (dst, *a.srcs) if v.by_row]
    known = all(v.by_row or not v.is_indirect() for v in (dst, *a.srcs))
    need(known, "indirect", "addresses are known when compiling, or by vector_offset; got {} and {}", dst, a.srcs)
    for view in by_row:
        _need_index(view)
    need(not by_row or n == 2, "dma-sources", "read-modify-write by vector_offset takes two sources; got {}", n)
    need(not by_row or a.unique_indices, "value", "unique_indices must be True; repeated indices are not supported")
    own = not dst.by_row or (len(by_row) == 2 and by_row[1].storage is dst.storage)
    need(own, "dma-sources", "a scatter adds to its own destination: one source must be dst's access pattern")

    def execute(machine: Machine) -> None:
        total: Array = np.zeros((), np.float32)
        rows: Any = None
        for src in a.srcs:
            if src.by_row:
                index = _index(machine, src)
                rows = machine.rows(src, index, a.oob_mode is SKIP)
                unique, counts = np.unique(index[rows.valid], return_counts=True)
                if (counts > 1).any():
                    found = f"index {unique[counts.argmax()]} occurs {counts.max()} times; all but one update is lost"
                    refuse("unique-indices", f"{found}. Make indices unique per call")
                values = machine.gather(src, rows)
            else:
                values = machine.read(src)
            total = total + f32(values).reshape(dst.shape)
        if dst.by_row:
            machine.scatter(dst, rows, total)
        elif rows is not None:
            _write_rows(machine, dst, total.reshape(rows.address.shape), rows)
        else:
            machine.write(dst, total)

    return execute


@instruction("D", special=True, same_dtype="dst src", dst=Tile(SBUF, write=True), src=IN, axes=None, priority=None, dge_mode=dge_mode.unknown, oob_mode=oob_mode.error)  # fmt: skip
def dma_transpose(a: Args) -> Compute:
    """dst = src with its first and last dimension exchanged; with a vector_offset, rows are gathered first."""
    dst, src, mode = a.dst, a.src, a.dge_mode.name
    need(a.priority is None, "target", "priority needs NeuronCore-v4 (Trn3); the target is trn2")
    known = src.ndim in AXES and (a.axes is None or tuple(a.axes) == AXES[src.ndim])
    need(known, "axes", "axes are {}; got {} for {}", list(AXES.values()), a.axes, src)
    order = AXES.get(src.ndim, (1, 0))
    shape = tuple(src.shape[i] for i in order)
    fix = "give dst that shape, or a view of it with reshape_dim"
    need(dst.shape == shape, "shape", "dst {} must be {} for src {}; {}", dst, list(shape), src, fix)
    size, rows, last = src.dtype.itemsize, src.shape[0], src.shape[-1]
    if src.by_row:
        need(mode in ("unknown", "swdge"), "dma-mode", "an indirect transpose is swdge; got {}", mode)
        good = size == 2 and rows % 16 == 0 and last <= 128 and (src.ndim < 4 or 1 in src.shape[1:3])
        fix = "2-byte dtype, rows a multiple of 16, last <= 128, one middle dimension of 1"
        need(good, "dma-transpose", "an indirect source needs a {}; got {}", fix, src)
        i = src.indirect_index.source
        p, n = i.shape[0], i.free_size
        good = i.dtype == "uint32" and i.buffer in SBUF and p % 16 == 0 and (n == 1 or p == 128) and p * n >= rows
        fix = f"uint32 in SBUF, 16..128 partitions by 16 (128 for several columns), at least {rows} in all"
        need(good, "vector-offset", "indices are {}; got {}", fix, i)
    else:
        dynamic = src.is_indirect() or dst.is_indirect()
        modes = ("unknown", "hwdge") if dynamic else ("unknown", "hwdge", "none")
        need(mode in modes, "dma-mode", "a direct transpose is {}; got {}", " or ".join(modes), mode)
        need(size in (2, 4), "dtype", "2-byte or 4-byte dtypes; got {}", src.dtype)
        block = rows == 16 if src.ndim == 2 else rows in (1, 2, 4, 8, 16) and rows * src.shape[-2] % 16 == 0
        fix = "a 2-byte dtype, last <= 128, 16 rows (3-D, 4-D: 1, 2, 4, 8, 16 and rows x second-last % 16 == 0)"
        block = size == 2 and last <= 128 and block
        need(block or mode != "hwdge", "dma-transpose", "hwdge needs {}; got {}", fix, src)
        more = "transpose with nisa.nc_transpose, or gather rows by a vector_offset"
        found = "a run-time address needs hardware descriptors, which take {}; got {}; {}"
        need(block or not dynamic, "dynamic-dma-transpose", found, fix, src, more)
    skip = a.oob_mode is SKIP
    need(not skip or src.by_row, "dma-mode", "oob_mode.skip goes with an indirect source")

    def execute(machine: Machine) -> None:
        if not src.by_row:
            machine.write(dst, machine.read(src).transpose(order))
            return
        found = machine.rows(src, _index(machine, src), skip)
        _write_rows(machine, dst, machine.gather(src, found).reshape(src.shape), found, order)

    return execute
