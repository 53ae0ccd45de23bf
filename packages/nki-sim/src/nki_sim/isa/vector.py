"""The Vector Engine's instructions (several run on Scalar or GpSimd as well): element-wise, reductions, search."""

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any

import numpy as np

from nki_sim import errors
from nki_sim.constants import Engine, reduce_cmd
from nki_sim.dtypes import FLOATS, INTS, NUMPY, cast, f32
from nki_sim.errors import need
from nki_sim.instruction import COLUMN, IN, OUT, OUT_COLUMN, REQUIRED, Args, Compute, Tile, instruction
from nki_sim.limits import BN_STATS_FREE, PARTITIONS
from nki_sim.machine import Machine
from nki_sim.ops import OPS, TRN3_ONLY, UNLISTED, Op, alu
from nki_sim.tensor import MemoryRegion, NkiTensor

Array = np.ndarray
FP32_MIN = float(np.finfo(np.float32).min)
COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
INDEX = Tile(dtypes=("uint16", "uint32"), write=True)
ANY_COLUMN = COLUMN._replace(dtypes=None)
BOUND = COLUMN._replace(scalar=False)


# -- shared by the engines --------------------------------------------------------------------------------------------
def line(x: Array) -> Array:
    """[P, elements per partition]."""
    return x.reshape(x.shape[0], -1)


def like(x: Array, target: NkiTensor) -> Array:
    """Return x in the target's shape; a column is left to broadcast."""
    column = x.size == x.shape[0] != target.size
    return x.reshape(x.shape[0], *(1,) * (target.ndim - 1)) if column else x.reshape(target.shape)


def operands(arrays: tuple[Array, ...], target: NkiTensor, *values: Any, kind: Any = np.float32) -> list[Any]:
    """Numbers, and tensors (in the order read) as columns against `target`, in one dtype."""
    rest = iter(arrays)
    known = [like(next(rest), target) if isinstance(v, NkiTensor) else v for v in values]
    return [None if v is None else np.asarray(v).astype(kind) for v in known]


def need_alu(op: Any, bitvec: bool | None = False) -> None:
    """Refuse what is no ALU operator of this kind (None: either)."""
    need(isinstance(op, Op) and op.alu is not None, "op", "op must be an ALU operator such as nl.add; got {!r}", op)
    need(op.name not in TRN3_ONLY, "target", "{} needs NeuronCore-v4 (Trn3); trn2 is modelled", op)
    fix = "multiply by nisa.reciprocal's result" if op.name == "divide" else "compute it from operators that are"
    need(op.name not in UNLISTED, "alu-operator", "{} is no operator of the ALU (nki.api.shared); {}", op, fix)
    need(bitvec is None or op.bitvec is bitvec, "op", "{} is not {}", op, "bitwise" if bitvec else "arithmetic")


def need_shape(name: str, view: NkiTensor, *shape: int) -> None:
    """Refuse unless a view is (partitions, elements per partition)."""
    need((view.shape[0], view.free_size) == shape, "shape", "{} must be {}; got {}", name, shape, view)


def need_ints(op: Op, *views: NkiTensor) -> None:
    """Bitwise operators take integers."""
    need(not op.bitvec or all(v.dtype in INTS for v in views), "dtype", "{} works on integers; got {}", op, views)


def fold(op: Op, x: Array) -> Array:
    """Reduce the free axes: [P]."""
    return op.alu.reduce(line(x), axis=1) if isinstance(op.alu, np.ufunc) else reduce(op.alu, line(x).T)


def reducing(a: Args, op: Op, cmd: reduce_cmd, body: Callable[..., Array]) -> Callable[[Machine], None]:
    """dst = body(arrays read), also folded into the engine's reduce registers, one a lane, and read out to reduce_res."""

    def execute(machine: Machine) -> None:
        init, empty = getattr(a, "reduce_init", None), np.full(PARTITIONS, np.nan, np.float32)
        values = body(*[machine.read(v) for v in machine.instr.reads if v is not init])
        machine.write(a.dst, values)
        lanes = machine.accumulators.setdefault((machine.core, machine.instr.engine), empty)
        lanes = lanes[a.dst.partition : a.dst.partition + a.dst.shape[0]]
        if cmd in (reduce_cmd.reset, reduce_cmd.reset_reduce):
            lanes[:] = op.identity
        elif cmd is reduce_cmd.load_reduce:
            lanes[:] = line(f32(machine.read(init)))[:, 0] if isinstance(init, NkiTensor) else init
        if cmd not in (reduce_cmd.idle, reduce_cmd.reset):
            lanes[:] = alu(op, lanes, fold(op, f32(values)))
        if a.reduce_res is not None:
            machine.write(a.reduce_res, -lanes if getattr(a, "reduce_res_negate", False) else lanes)

    return execute


def need_reduce(op: Any, allowed: tuple[str, ...], cmd: reduce_cmd, init: Any = None) -> None:
    """The reduce operator is one of `allowed`; an initial value comes with load_reduce and only then."""
    need(isinstance(op, Op) and op.name in allowed, "op", "the reduction must be one of {}; got {!r}", allowed, op)
    paired = (init is not None) == (cmd is reduce_cmd.load_reduce)
    need(paired, "reduce-cmd", "an initial value goes with reduce_cmd.load_reduce only; got {!r}, {}", init, cmd)


def write_where(machine: Machine, dst: NkiTensor, chosen: Array, values: Array) -> None:
    """Write the chosen elements of dst, and count only them as written."""
    offset = machine.locate(dst)
    if offset is not None:
        cell = machine.cell(dst.storage)
        np.copyto(cell.array(dst, offset), cast(values, NUMPY[dst.dtype]), where=chosen)
        machine.wrote(cell, dst, offset, chosen=None if chosen.all() else chosen)


# -- copies and element-wise ------------------------------------------------------------------------------------------
@instruction("VSG", same="dst src", dst=OUT, src=IN, engine=Engine.unknown)
def tensor_copy(a: Args) -> Compute:
    """dst = src: the same bits for the same dtype, through float32 otherwise."""
    return (lambda x: x) if a.src.dtype == a.dst.dtype else f32


@instruction("VG", dst=OUT, value=REQUIRED, engine=Engine.unknown)
def memset(a: Args) -> Compute:
    """Fill with a constant of the tile's kind."""
    whole = a.dst.dtype not in INTS or isinstance(a.value, (int, np.integer))
    need(
        whole,
        "memset-value",
        "dst is {} and the value {!r}; write {}",
        a.dst.dtype,
        a.value,
        int(a.value) if np.isfinite(a.value) else "an int",
    )
    constant = cast(np.asarray(a.value), NUMPY[a.dst.dtype])
    return lambda: constant


@instruction("V", special=True, same="dst src predicate", same_dtype="dst src", one_psum="src predicate", dst=OUT, src=Tile(scalar=True), predicate=Tile(dtypes=("uint8", "uint16", "uint32")), reverse_pred=False)  # fmt: skip
def tensor_copy_predicated(a: Args) -> Compute:
    """dst = src where the predicate is nonzero (reverse_pred: zero); elsewhere dst stays as it is."""

    def execute(machine: Machine) -> None:
        chosen = (like(machine.read(a.predicate), a.dst) != 0) != a.reverse_pred
        values = like(machine.read(a.src), a.dst) if isinstance(a.src, NkiTensor) else np.asarray(a.src)
        write_where(machine, a.dst, chosen, values)

    return execute


_EXACT = ("add", "subtract", "multiply", "maximum", "minimum")


@instruction("VG", same="dst data1 data2", one_psum="data1 data2", dst=OUT, data1=IN, data2=IN, op=REQUIRED, engine=Engine.unknown)  # fmt: skip
def tensor_tensor(a: Args) -> tuple[Compute, str]:
    """dst = data1 <op> data2. All-int32/uint32 operands go to GpSimd, which is exact; else through float32."""
    need_alu(a.op, None)
    need(not a.op.unary, "op", "{} takes one operand; use nisa.tensor_scalar or nisa.activation", a.op)
    views = (a.dst, a.data1, a.data2)
    need_ints(a.op, *views)
    psum = any(v.buffer is MemoryRegion.psum for v in views)
    wide = all(v.dtype in ("int32", "uint32") for v in views)
    chosen = a.engine is Engine.gpsimd or (a.engine is Engine.unknown and ((wide and not psum) or a.op.name == "power"))
    letter = "G" if chosen and not a.op.bitvec else "V"
    need(a.op.name != "power" or letter == "G", "engine-buffer", "nl.power runs on GpSimd only")
    raw = a.op.bitvec or (letter == "G" and wide and a.op.name in _EXACT)
    see = (lambda x: x) if raw else f32
    return (lambda x, y: alu(a.op, like(see(x), a.dst), like(see(y), a.dst))), letter


SCALAR_ENGINE_PAIRS = (("multiply", "add"), ("multiply", None), ("add", None))
_OPERAND = ANY_COLUMN._replace(optional=True)


@instruction("VSG", same="dst data", dst=OUT, data=IN, op0=REQUIRED, operand0=_OPERAND, reverse0=False, op1=None, operand1=_OPERAND, reverse1=False, engine=Engine.unknown)  # fmt: skip
def tensor_scalar(a: Args) -> tuple[Compute, str]:
    """dst = (data <op0> operand0) <op1> operand1, operands constants or one value a partition."""
    need_alu(a.op0, None)
    given = [v for v in (a.operand0, a.operand1) if isinstance(v, NkiTensor)]
    need_ints(a.op0, a.dst, a.data, *given)
    floats = a.op0.bitvec or errors.compat or all(v.dtype == "float32" for v in given)
    need(floats, "dtype", "tensors for operand0 and operand1 must be float32; got {}", given)
    if a.op1 is not None:
        need_alu(a.op1, a.op0.bitvec)
    need(a.op1 is not None or a.operand1 is None, "op", "operand1 is given without op1")
    pairs = ((a.op0, a.operand0), (a.op1, a.operand1))
    odd = [(op, v) for op, v in pairs if op and op.unary and (isinstance(v, NkiTensor) or v)]
    need(not odd or errors.compat, "op", "of a unary operator the operand is None or 0; got {}", odd)
    lacks = [op for op, v in pairs if op and not op.unary and v is None]
    need(not lacks, "op", "{} takes an operand, and there is none", lacks)
    pair = (a.op0.name, a.op1.name if a.op1 else None)
    need(not a.op0.bitvec or a.engine in (Engine.unknown, Engine.vector), "engine", "bitwise operators run on Vector")
    scalar = a.engine is not Engine.scalar or pair in SCALAR_ENGINE_PAIRS
    need(scalar, "op", "the Scalar Engine of trn2 does multiply-add, multiply or add; got {}. Use engine.vector", pair)
    need(a.engine is not Engine.gpsimd or pair == ("rsqrt", None), "op", "GpSimd does rsqrt only; got {}", pair)
    psum = MemoryRegion.psum in (a.dst.buffer, a.data.buffer)
    fast = {Engine.scalar: "S", Engine.gpsimd: "G", Engine.vector: "V"}
    letter = fast.get(a.engine, "G" if pair[0] == "rsqrt" and not psum else "V")

    def compute(x: Array, *rest: Array) -> Array:
        x = x if a.op0.bitvec else f32(x)
        p, q = operands(rest, a.dst, a.operand0, a.operand1, kind=x.dtype)
        x = alu(a.op0, like(x, a.dst), p, a.reverse0)
        return x if a.op1 is None else alu(a.op1, x, q, a.reverse1)

    return compute, letter


@instruction("VG", same="dst data operand1", one_psum="data operand1", dst=OUT, data=IN, op0=REQUIRED, operand0=ANY_COLUMN, op1=REQUIRED, operand1=IN, reverse0=False, reverse1=False)  # fmt: skip
def scalar_tensor_tensor(a: Args) -> Compute:
    """dst = (data <op0> operand0) <op1> operand1, operand1 a tile."""
    need_alu(a.op0)
    need_alu(a.op1)

    def compute(x: Array, *rest: Array) -> Array:
        (p,) = operands(rest[:-1], a.dst, a.operand0)
        return alu(a.op1, alu(a.op0, like(f32(x), a.dst), p, a.reverse0), like(f32(rest[-1]), a.dst), a.reverse1)

    return compute


@instruction("V", same="dst data", dst=OUT, data=IN)
def reciprocal(a: Args) -> Compute:
    """dst = 1 / data."""
    return lambda x: 1 / f32(x)


# -- reductions and scans ---------------------------------------------------------------------------------------------
@instruction("VG", dst=OUT, op=REQUIRED, data=IN, axis=REQUIRED, negate=False, keepdims=False)
def tensor_reduce(a: Args) -> Compute:
    """Reduce the trailing free axes."""
    need_alu(a.op, None)
    need(a.op.identity is not None, "op", "{} is no reduction", a.op)
    axes = sorted(i % a.data.ndim for i in ([a.axis] if isinstance(a.axis, int) else a.axis))
    trailing = axes and axes == list(range(axes[0], a.data.ndim)) and axes[0] > 0
    need(trailing, "axis", "axis {} must be the last free axes of {}, never the partition", a.axis, a.data)
    kept = a.data.shape[: axes[0]]
    need_shape("dst", a.dst, kept[0], prod(kept[1:]))
    need_ints(a.op, a.dst, a.data)
    need(not (a.op.bitvec and a.negate), "op", "{} cannot be negated", a.op)

    def compute(x: Array) -> Array:
        reduced = fold(a.op, (x if a.op.bitvec else f32(x)).reshape(prod(kept), -1))
        return -reduced if a.negate else reduced

    return compute


@instruction("V", special=True, same="dst data", dst=OUT, data=IN, op0=REQUIRED, operand0=COLUMN, reduce_op=REQUIRED, reduce_res=OUT_COLUMN, reverse0=False, reduce_cmd=reduce_cmd.reset_reduce, reduce_init=COLUMN._replace(optional=True), reduce_res_negate=False)  # fmt: skip
def tensor_scalar_reduce(a: Args) -> Compute:
    """dst = data <op0> operand0, folded over the free axes into the reduce registers."""
    need_alu(a.op0)
    need_reduce(a.reduce_op, ("add", "multiply", "maximum", "minimum"), a.reduce_cmd, a.reduce_init)
    need(not a.reverse0, "op", "reverse0 is not supported by NKI here; swap the operands or use tensor_scalar")

    def body(x: Array, *rest: Array) -> Array:
        return alu(a.op0, like(f32(x), a.dst), operands(rest, a.dst, a.operand0)[0])

    return reducing(a, a.reduce_op, a.reduce_cmd, body)


_SMALL = ("int8", "uint8", "int16", "uint16")


@instruction("V", special=True, same="dst predicate on_true", one_psum="on_true predicate", dst=OUT, predicate=Tile(dtypes=_SMALL), on_true=Tile(dtypes=(*FLOATS, *_SMALL)), on_false=ANY_COLUMN, reduce_res=OUT_COLUMN._replace(dtypes=FLOATS), reduce_cmd=reduce_cmd.idle, reduce_op=OPS["maximum"], reverse_pred=False)  # fmt: skip
def select_reduce(a: Args) -> Compute:
    """dst = on_true where the predicate holds, else on_false; optionally the maximum over the free axes."""
    need_reduce(a.reduce_op, ("maximum",), a.reduce_cmd)

    def body(p: Array, x: Array, *rest: Array) -> Array:
        other = operands(rest, a.dst, a.on_false)[0]
        return np.where((like(p, a.dst) != 0) != a.reverse_pred, like(f32(x), a.dst), other)

    return reducing(a, a.reduce_op, a.reduce_cmd, body)


@instruction("V", special=True, same="dst on_true_tile", dst=OUT, on_true_tile=Tile(dtypes=FLOATS), comp_op0=REQUIRED, comp_op1=REQUIRED, bound0=BOUND, bound1=BOUND, reduce_cmd=reduce_cmd.reset_reduce, reduce_res=OUT_COLUMN, reduce_op=OPS["maximum"], range_start=0, on_false_value=FP32_MIN)  # fmt: skip
def range_select(a: Args) -> Compute:
    """Keep elements whose index (range_start + position) satisfies both comparisons; the others become the lowest float32."""
    need_reduce(a.reduce_op, ("maximum",), a.reduce_cmd)
    compares = all(isinstance(c, Op) and c.name in COMPARISONS for c in (a.comp_op0, a.comp_op1))
    need(compares, "op", "comparisons are {}; got {!r}, {!r}", COMPARISONS, a.comp_op0, a.comp_op1)
    lowest = np.float32(FP32_MIN)
    need(np.float32(a.on_false_value) == lowest, "value", "on_false_value is {}, not {}", FP32_MIN, a.on_false_value)
    end = a.range_start + a.on_true_tile.free_size
    need(end <= 2**24, "value", "indices reach {}; float32 counts exactly to 2**24", end)
    index = np.arange(a.range_start, end, dtype=np.float32)

    def body(x: Array, low: Array, high: Array) -> Array:
        keep = (alu(a.comp_op0, index, line(low)) != 0) & (alu(a.comp_op1, index, line(high)) != 0)
        return np.where(keep, line(f32(x)), lowest).reshape(a.dst.shape)

    return reducing(a, a.reduce_op, a.reduce_cmd, body)


@instruction("V", same="dst data0 data1", one_psum="data0 data1", dst=OUT, data0=IN, data1=IN, initial=ANY_COLUMN, op0=REQUIRED, op1=REQUIRED, reverse0=False, reverse1=False)  # fmt: skip
def tensor_tensor_scan(a: Args) -> Compute:
    """r[i] = (data0[i] <op0> r[i-1]) <op1> data1[i], r[-1] = initial, along the free elements."""
    need_alu(a.op0)
    need_alu(a.op1)

    def compute(x: Array, y: Array, *rest: Array) -> Array:
        other = line(f32(y)).T
        first = line(f32(rest[0]))[:, 0] if rest else np.full(len(x), a.initial, np.float32)
        neutral = {"multiply": 1.0, "add": 0.0}.get(a.op0.name)
        sums = neutral is not None and isinstance(a.op1.alu, np.ufunc) and a.op1.name != "subtract"
        if sums and (x == neutral).all():
            return a.op1.alu.accumulate(np.vstack([first, other]), axis=0)[1:].T  # a cumulative sum, in the same order
        columns, state = f32(line(x)).T, first
        result = np.empty(columns.shape, np.float32)
        for i, column in enumerate(columns):
            state = result[i] = alu(a.op1, alu(a.op0, column, state, a.reverse0), other[i], a.reverse1)
        return result.T

    return compute


# -- statistics, search, shuffle --------------------------------------------------------------------------------------
@instruction("V", dst=OUT, data=IN)
def bn_stats(a: Args) -> Compute:
    """Count, mean and variance * count of the even elements of each partition, then of the odd ones."""
    n, limit = a.data.free_size, BN_STATS_FREE
    need(n <= limit, "bn-stats-free", "{} elements per partition, at most {}; bn_aggr joins slices", n, limit)
    need_shape("dst", a.dst, a.data.shape[0], 6)

    def compute(x: Array) -> Array:
        parts = []
        for half in (line(f32(x))[:, 0::2], line(f32(x))[:, 1::2]):
            count = np.full(len(half), half.shape[1], np.float32)
            mean = half.sum(axis=1) / np.maximum(count, 1)
            parts += [count, mean, np.square(half - mean[:, None]).sum(axis=1)]
        return np.stack(parts, axis=1)

    return compute


@instruction("V", dst=OUT, data=IN)
def bn_aggr(a: Args) -> Compute:
    """Mean and variance from (count, mean, variance * count) triples."""
    need(a.data.free_size % 3 == 0, "shape", "data {} must hold triples (count, mean, variance * count)", a.data)
    need_shape("dst", a.dst, a.data.shape[0], 2)

    def compute(x: Array) -> Array:
        count, mean, m2 = (line(f32(x))[:, i::3] for i in range(3))
        total = count.sum(axis=1)
        overall = (count * mean).sum(axis=1) / total
        variance = (m2 + count * np.square(mean - overall[:, None])).sum(axis=1) / total
        return np.stack([overall, variance], axis=1)

    return compute


def _searchable(view: NkiTensor) -> None:
    n = view.free_size
    need(8 <= n <= 16384, "search-size", "{} elements per partition; 8 to 16384 can be searched", n)


@instruction("V", dst=OUT, src=IN)
def max8(a: Args) -> Compute:
    """The eight largest values of each partition, descending."""
    _searchable(a.src)
    need_shape("dst", a.dst, a.src.shape[0], 8)
    return lambda x: -np.sort(np.partition(-line(f32(x)), 7, axis=1)[:, :8], axis=1)


def _matches(x: Array, vals: Array, order: range) -> Array:
    """Positions [P, 8] of vals in x, each occurrence taken once, duplicates in `order`; -1 (all ones) where there is none."""
    x, found = x.copy(), np.full(vals.shape, -1, np.int64)
    lanes = np.arange(len(x))
    for k in order:
        hit = x == vals[:, k : k + 1]
        at = np.argmax(hit, axis=1)
        there = hit[lanes, at]
        found[there, k] = at[there]
        x[lanes[there], at[there]] = np.nan  # taken
    return found


@instruction("V", dst=INDEX, data=IN, vals=IN)
def nc_find_index8(a: Args) -> Compute:
    """Where the eight vals of each partition stand in data; equal vals take successive occurrences."""
    _searchable(a.data)
    for name in ("dst", "vals"):
        need_shape(name, getattr(a, name), a.data.shape[0], 8)
    return lambda x, v: _matches(line(f32(x)), line(f32(v)), range(8)).astype(NUMPY[a.dst.dtype])


@instruction("V", same="dst data", dst=OUT, data=IN, vals=IN, imm=REQUIRED, dst_idx=INDEX._replace(optional=True))
def nc_match_replace8(a: Args) -> Compute:
    """data with one occurrence of each val replaced by imm; equal vals take occurrences from the last val backwards."""
    _searchable(a.data)
    need_shape("vals", a.vals, a.data.shape[0], 8)

    def compute(x: Array, v: Array) -> Any:
        x = line(f32(x)).copy()
        found = _matches(x, line(f32(v)), range(7, -1, -1))
        lane, k = np.nonzero(found >= 0)
        x[lane, found[lane, k]] = a.imm
        return x if a.dst_idx is None else (x, found.astype(NUMPY[a.dst_idx.dtype]))

    return compute


@instruction("V", special=True, same_dtype="dst src", dst=OUT, src=IN, shuffle_mask=REQUIRED)
def nc_stream_shuffle(a: Args) -> Compute:
    """Shuffle within each 32 partitions: dst partition i takes src partition mask[i]; 255 leaves it as it is."""
    mask = np.array([int(m) for m in a.shuffle_mask])
    valid = len(mask) == 32 and all(0 <= m < 32 or m == 255 for m in mask)
    need(valid, "shuffle-mask", "the mask has 32 entries, 0..31 or 255; got {}", list(mask))
    need_shape("dst", a.dst, a.dst.shape[0], a.src.free_size)
    lanes = np.arange(a.dst.shape[0])
    wanted = mask[lanes % 32]
    source, keep = lanes // 32 * 32 + wanted, wanted == 255
    inside = keep | (source < a.src.shape[0])
    need(inside.all(), "shuffle-mask", "the mask takes partition {} of {}", source.max(where=~keep, initial=0), a.src)

    def execute(machine: Machine) -> None:
        values = line(machine.read(a.src))[np.where(keep, 0, source)].reshape(a.dst.shape)
        chosen = np.broadcast_to(~keep.reshape(-1, *(1,) * (a.dst.ndim - 1)), a.dst.shape)
        write_where(machine, a.dst, chosen, values)

    return execute
