"""DMA: copies between HBM and SBUF with gather and scatter, read-modify-write, and transposition on the way."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nki_sim.constants import dge_mode, oob_mode
from nki_sim.constants import engine as Engine
from nki_sim.dtypes import f32
from nki_sim.errors import refuse
from nki_sim.isa.vector import partial_write
from nki_sim.limits import DMA_COMPUTE_SOURCES
from nki_sim.ops import Op
from nki_sim.program import Instr
from nki_sim.rules import HBM, SBUF, instruction, out, rule, tile
from nki_sim.tensor import MemoryRegion, NkiTensor

if TYPE_CHECKING:
    from nki_sim.machine import Machine

Array = np.ndarray
ANYWHERE = HBM | SBUF  # DMA does not reach PSUM
AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def vector(view: NkiTensor) -> bool:
    """Whether a view gathers or scatters row by row."""
    return view.indirect_index is not None and view.indirect_index.kind == "vector"


def _no_priority(title: str, priority: Any) -> None:
    rule(priority is None, "target", lambda: f"{title}: priority needs NeuronCore-v4 (Trn3); the target is trn2")


def _check_index(title: str, view: NkiTensor) -> None:
    """A vector_offset is one integer for each row, in SBUF."""
    assert view.indirect_index is not None
    index = view.indirect_index.source
    good = (
        isinstance(index, NkiTensor)
        and index.buffer is MemoryRegion.sbuf
        and index.dtype in ("int32", "uint32")
        and index.shape[0] == view.shape[0]
        and index.free_size == 1
    )
    rule(
        good,
        "vector-offset",
        lambda: (
            f"{title}: vector_offset must be an SBUF ({view.shape[0]}, 1) tensor of int32 or uint32, one index for each row of {view.shape}; got {index!r}"
        ),
    )


def _index(machine: "Machine", view: NkiTensor, instr: Instr) -> Array:
    assert view.indirect_index is not None and isinstance(view.indirect_index.source, NkiTensor)
    return machine.read(view.indirect_index.source, instr)


@instruction("D", special=True, dst=out(ANYWHERE), src=tile(ANYWHERE))
def dma_copy(
    dst: Any,
    src: Any,
    priority: Any = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: Engine = Engine.unknown,
) -> Any:
    """dst = src, elements in order, converted through float32; gather or scatter when one side has a vector_offset."""
    _no_priority("dma_copy", priority)
    rule(
        dst.size == src.size,
        "shape",
        lambda: f"dma_copy: dst {dst.shape} has {dst.size} elements, src {src.shape} has {src.size}",
    )
    both = vector(dst) and vector(src)
    rule(not both, "dma-mode", lambda: "dma_copy: gather and scatter in one copy are not possible; copy through SBUF")
    mode = dge_mode.name
    if mode == "hwdge":
        rule(
            dst.dtype == src.dtype,
            "dma-mode",
            lambda: f"dma_copy: hwdge does not convert; got {src.dtype} -> {dst.dtype}",
        )
        rule(
            not vector(dst) and not vector(src),
            "dma-mode",
            lambda: "dma_copy: hwdge does not gather or scatter; use dge_mode.swdge or unknown",
        )
    rule(
        mode != "none" or not (dst.is_indirect() or src.is_indirect()),
        "dma-mode",
        lambda: (
            "dma_copy: dge_mode.none has addresses fixed before the kernel starts; an indirect address needs swdge or hwdge"
        ),
    )
    rule(
        engine is Engine.unknown or (mode == "hwdge" and engine in (Engine.sync, Engine.scalar)),
        "dma-mode",
        lambda: f"dma_copy: engine is sync or scalar, and only with dge_mode.hwdge; got {engine} with {mode}",
    )
    for view in (dst, src):
        if vector(view):
            _check_index("dma_copy", view)
    skip = oob_mode.name == "skip"

    def execute(machine: "Machine", instr: Instr) -> None:
        if vector(src):
            address, valid = machine.rows(src, _index(machine, src, instr).reshape(-1), instr, skip)
            write_rows(machine, instr, dst, machine.gather(src, address, valid, instr), valid)
            return
        if machine.locate(src, instr, skip) is None or (not vector(dst) and machine.locate(dst, instr, skip) is None):
            return
        values = machine.read(src, instr)
        values = values if src.dtype == dst.dtype else f32(values)
        if vector(dst):
            address, valid = machine.rows(dst, _index(machine, dst, instr).reshape(-1), instr, skip)
            machine.scatter(dst, address, valid, values.reshape(address.shape), instr)
        else:
            machine.write(dst, values, instr)

    return execute


def write_rows(machine: "Machine", instr: Instr, dst: NkiTensor, values: Array, valid: Array) -> None:
    """Write gathered rows; rows that were skipped stay as they are."""
    if valid.all():
        machine.write(dst, values.reshape(dst.shape), instr)
    else:
        chosen = np.broadcast_to(valid[:, None], values.shape).reshape(dst.shape)
        partial_write(machine, instr, dst, chosen, values.reshape(dst.shape))


@instruction("D", special=True, dst=out(ANYWHERE), srcs=tile(ANYWHERE))
def dma_compute(
    dst: Any,
    srcs: Any,
    reduce_op: Op,
    scales: Any = None,
    unique_indices: bool = True,
    oob_mode: oob_mode = oob_mode.error,
) -> Any:
    """dst = sum of srcs in float32. With a vector_offset: dst[rows] += src (scatter) or dst += src[rows] (gather)."""
    rule(
        isinstance(reduce_op, Op) and reduce_op.name == "add",
        "op",
        lambda: f"dma_compute: reduce_op must be nl.add; got {reduce_op!r}",
    )
    rule(
        scales is None or all(float(s) == 1.0 for s in scales),
        "value",
        lambda: f"dma_compute: scales must be 1.0; got {scales}",
    )
    rule(
        1 <= len(srcs) <= DMA_COMPUTE_SOURCES,
        "dma-sources",
        lambda: f"dma_compute: {len(srcs)} sources; at most {DMA_COMPUTE_SOURCES}",
    )
    rule(
        all(s.size == dst.size for s in srcs),
        "shape",
        lambda: f"dma_compute: dst {dst.shape} and srcs {[s.shape for s in srcs]} must have the same elements",
    )
    indirect = [v for v in (dst, *srcs) if vector(v)]
    if indirect:
        rule(
            len(srcs) == 2,
            "dma-sources",
            lambda: f"dma_compute: read-modify-write by vector_offset takes two sources; got {len(srcs)}",
        )
        rule(
            unique_indices,
            "value",
            lambda: "dma_compute: indices that repeat are not supported; unique_indices must be True",
        )
        for view in indirect:
            _check_index("dma_compute", view)
        if vector(dst):
            rule(
                len(indirect) == 2 and indirect[1].storage is dst.storage,
                "dma-sources",
                lambda: "dma_compute: a scatter adds to its own destination; one source must be dst's access pattern",
            )
    skip = oob_mode.name == "skip"

    def execute(machine: "Machine", instr: Instr) -> None:
        total, valid, address = None, None, None
        for src in srcs:
            if vector(src):
                index = _index(machine, src, instr).reshape(-1)
                address, valid = machine.rows(src, index, instr, skip)
                unique, counts = np.unique(index[valid], return_counts=True)
                if len(unique) < int(valid.sum()):
                    refuse(
                        "unique-indices",
                        f"dma_compute: index {int(unique[counts.argmax()])} occurs {int(counts.max())} times; a read-modify-write loses all but one. Make indices unique per call",
                        instr.where,
                    )
                values = f32(machine.gather(src, address, valid, instr))
            else:
                values = f32(machine.read(src, instr))
            total = values if total is None else total + values.reshape(total.shape)
        assert total is not None
        if vector(dst):
            assert address is not None and valid is not None
            machine.scatter(dst, address, valid, total.reshape(address.shape), instr)
        elif valid is not None:
            write_rows(machine, instr, dst, total.reshape(len(valid), -1), valid)
        else:
            machine.write(dst, total, instr)

    return execute


@instruction("D", special=True, dst=out(SBUF), src=tile(ANYWHERE), same_dtype=("dst", "src"))
def dma_transpose(
    dst: Any,
    src: Any,
    axes: Any = None,
    priority: Any = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
) -> Any:
    """dst = src with its first and last dimension exchanged; with a vector_offset, rows are gathered first."""
    _no_priority("dma_transpose", priority)
    rule(
        src.ndim in AXES and (axes is None or tuple(axes) == AXES[src.ndim]),
        "axes",
        lambda: f"dma_transpose: axes are {AXES}; got {axes} for {src.shape}",
    )
    order = AXES.get(src.ndim, (1, 0))
    shape = tuple(src.shape[a] for a in order)
    rule(
        dst.shape[0] == shape[0] and dst.size == src.size,
        "shape",
        lambda: f"dma_transpose: dst {dst.shape} must be {shape}, src {src.shape} with axes {order}",
    )
    size, rows, last, mode = src.dtype.itemsize, src.shape[0], src.shape[-1], dge_mode.name
    if vector(src):
        assert src.indirect_index is not None
        index = src.indirect_index.source
        rule(
            mode in ("unknown", "swdge"),
            "dma-mode",
            lambda: f"dma_transpose: an indirect transpose is swdge; got {mode}",
        )
        rule(
            size == 2 and rows % 16 == 0 and last <= 128 and not src.buffer.on_chip,
            "dma-transpose",
            lambda: (
                f"dma_transpose: indirect needs a 2-byte dtype, rows a multiple of 16, at most 128 in the last dimension, src in HBM; got {src!r}"
            ),
        )
        rule(
            src.ndim < 4 or 1 in src.shape[1:3],
            "dma-transpose",
            lambda: f"dma_transpose: one of the middle dimensions of {src.shape} must be 1",
        )
        p, n = index.shape[0], index.free_size  # type: ignore[union-attr]
        good = (
            index.dtype == "uint32"
            and index.buffer is MemoryRegion.sbuf
            and 16 <= p <= 128
            and p % 16 == 0
            and (n == 1 or p == 128)
            and p * n >= rows
        )  # type: ignore[union-attr]
        rule(
            good,
            "vector-offset",
            lambda: (
                f"dma_transpose: indices are uint32 in SBUF, 16..128 partitions in steps of 16 (128 for several columns), at least {rows} of them; got {index!r}"
            ),
        )
    else:
        rule(
            mode in ("unknown", "hwdge"), "dma-mode", lambda: f"dma_transpose: a direct transpose is hwdge; got {mode}"
        )
        rule(size in (2, 4), "dtype", lambda: f"dma_transpose: 2-byte or 4-byte dtypes; got {src.dtype}")
        if mode == "hwdge":
            good = (
                size == 2
                and last <= 128
                and (rows == 16 if src.ndim == 2 else rows in (1, 2, 4, 8, 16) and rows * src.shape[-2] % 16 == 0)
            )
            rule(
                good,
                "dma-transpose",
                lambda: (
                    f"dma_transpose: hwdge needs a 2-byte dtype, last dimension <= 128 and 16 rows (2-D) or 1, 2, 4, 8, 16 with rows x second-last a multiple of 16; got {src!r}"
                ),
            )
    skip = oob_mode.name == "skip"
    rule(not skip or vector(src), "dma-mode", lambda: "dma_transpose: oob_mode.skip goes with an indirect source")

    def execute(machine: "Machine", instr: Instr) -> None:
        if not vector(src):
            machine.write(dst, machine.read(src, instr).transpose(order), instr)
            return
        flat = _index(machine, src, instr)
        index = flat.reshape(flat.shape[0], -1).T.reshape(-1)[:rows]
        address, valid = machine.rows(src, index, instr, skip)
        values = machine.gather(src, address, valid, instr).reshape(src.shape).transpose(order)
        if valid.all():
            machine.write(dst, values, instr)
        else:
            chosen = np.broadcast_to(valid.reshape(-1, *(1,) * (src.ndim - 1)), src.shape).transpose(order)
            partial_write(machine, instr, dst, chosen.reshape(dst.shape), values.reshape(dst.shape))

    return execute
