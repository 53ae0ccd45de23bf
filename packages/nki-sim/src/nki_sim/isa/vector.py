"""The Vector Engine's instructions (several run on Scalar or GpSimd as well): element-wise, reductions, search."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nki_sim.constants import engine as Engine
from nki_sim.constants import reduce_cmd
from nki_sim.constants import reduce_cmd as Cmd
from nki_sim.dtypes import FLOATS, INTS, NUMPY, cast, f32
from nki_sim.errors import refuse
from nki_sim.limits import BN_STATS_FREE, PARTITIONS
from nki_sim.ops import OPS, Op, alu
from nki_sim.program import Instr
from nki_sim.rules import column, instruction, out, rule, scalar_or_column, tile
from nki_sim.tensor import MemoryRegion, NkiTensor

if TYPE_CHECKING:
    from nki_sim.machine import Machine

FP32_MIN = float(np.finfo(np.float32).min)
COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
SEARCH = (8, 16384)  # elements per partition that the search instructions take
Array = np.ndarray


# -- helpers shared by the engines ------------------------------------------------------------------------------------
def line(x: Array) -> Array:
    """[P, elements per partition]."""
    return x.reshape(x.shape[0], -1)


def like(x: Array, target: NkiTensor) -> Array:
    """Reshaped to the target's shape; a column broadcasts."""
    if x.size == x.shape[0] != target.size:
        return x.reshape(x.shape[0], *(1,) * (target.ndim - 1))
    return x.reshape(target.shape)


def operands(arrays: tuple[Array, ...], data: NkiTensor, *values: Any) -> list[Any]:
    """Scalars as they are, tensors (in the order read) as float32 columns against `data`."""
    rest = iter(arrays)
    return [like(f32(next(rest)), data) if isinstance(v, NkiTensor) else v for v in values]


def need_op(title: str, op: Any, *, bitvec: bool | None = None) -> None:
    """Refuse what is no ALU operator."""
    if not isinstance(op, Op):
        raise TypeError(f"{title}: op must be an operator such as nl.add; got {op!r}")
    rule(op.alu is not None, "op", lambda: f"{title}: {op} is not an ALU operator")
    if bitvec is not None:
        rule(
            op.bitvec == bitvec,
            "op",
            lambda: f"{title}: {op} must be {'a bitwise' if bitvec else 'an arithmetic'} operator here",
        )


def fold(op: Op, x: Array) -> Array:
    """Reduce the free axes: [P]."""
    assert op.reduce is not None
    reduce = getattr(op.reduce, "reduce", None)
    if reduce is not None:
        return reduce(line(x), axis=1)  # type: ignore[no-any-return]
    columns = line(x).T
    result = columns[0]
    for c in columns[1:]:
        result = op.reduce(result, c)
    return result


def accumulate(
    machine: "Machine",
    instr: Instr,
    values: Array,
    op: Op,
    cmd: reduce_cmd,
    res: NkiTensor | None,
    init: Any = None,
    negate: bool = False,
) -> None:
    """The engine's reduce registers, one a lane: reset, fold `values` in, read out."""
    dst = instr.writes[0]
    lanes = slice(dst.partition, dst.partition + dst.shape[0])
    registers = machine.accumulators.setdefault((machine.core, instr.engine), np.full(PARTITIONS, np.nan, np.float32))
    if cmd in (Cmd.reset, Cmd.reset_reduce):
        registers[lanes] = op.identity
    elif cmd is Cmd.load_reduce:
        registers[lanes] = line(f32(machine.read(init, instr)))[:, 0] if isinstance(init, NkiTensor) else init
    if cmd in (Cmd.reduce, Cmd.reset_reduce, Cmd.load_reduce):
        assert op.reduce is not None
        registers[lanes] = op.reduce(registers[lanes], fold(op, f32(values)))
    if res is not None:
        machine.write(res, -registers[lanes] if negate else registers[lanes], instr)


def reducing(
    body: Callable[..., Array], arguments: Callable[[Instr], dict[str, Any]]
) -> Callable[["Machine", Instr], None]:
    """A special instruction: body(*arrays read) is written, then folded into the reduce registers."""

    def execute(machine: "Machine", instr: Instr) -> None:
        skip = [v for v in (instr.args.get("reduce_init"), instr.args.get("imm1")) if isinstance(v, NkiTensor)]
        values = body(*[machine.read(v, instr) for v in instr.reads if not any(v is s for s in skip)])
        machine.write(instr.writes[0], values, instr)
        accumulate(machine, instr, values, **arguments(instr))

    return execute


def check_reduce(title: str, op: Any, allowed: tuple[str, ...], cmd: reduce_cmd, init: Any = None) -> None:
    """The reduce operator is one of `allowed`, and an initial value comes with load_reduce only."""
    rule(
        isinstance(op, Op) and op.name in allowed,
        "op",
        lambda: f"{title}: reduce_op must be {' or '.join('nl.' + a for a in allowed)}; got {op!r}",
    )
    rule(
        (init is not None) == (cmd is Cmd.load_reduce),
        "reduce-cmd",
        lambda: f"{title}: reduce_init goes with reduce_cmd.load_reduce and with nothing else; got {cmd} and {init!r}",
    )


# -- copies and fills -------------------------------------------------------------------------------------------------
@instruction("VSG", dst=out(), src=tile(), same=("dst", "src"))
def tensor_copy(dst: Any, src: Any, engine: Engine = Engine.unknown) -> Any:
    """dst = src: the same bits for the same dtype, through float32 otherwise."""
    return lambda x: x if src.dtype == dst.dtype else f32(x)


@instruction("VG", dst=out())
def memset(dst: Any, value: float, engine: Engine = Engine.unknown) -> Any:
    """Fill with a constant of the tile's kind."""
    number = np.float64(value)
    rule(
        dst.dtype not in INTS or float(number).is_integer(),
        "dtype",
        lambda: f"memset: {value!r} is no value of {dst.dtype}",
    )
    constant = cast(np.asarray(value), NUMPY[dst.dtype])
    return lambda: constant


@instruction(
    "V",
    dst=out(),
    src=tile(scalar=True),
    predicate=tile(dtypes=("uint8", "uint16", "uint32")),
    same=("dst", "src", "predicate"),
    same_dtype=("dst", "src"),
    not_both_psum=("src", "predicate"),
    special=True,
)
def tensor_copy_predicated(dst: Any, src: Any, predicate: Any, reverse_pred: bool = False) -> Any:
    """dst = src where the predicate is nonzero (reverse_pred: zero); elsewhere dst stays, written or not."""

    def execute(machine: "Machine", instr: Instr) -> None:
        chosen = like(machine.read(predicate, instr), dst) != 0
        chosen = ~chosen if reverse_pred else chosen
        values = (
            like(machine.read(src, instr), dst) if isinstance(src, NkiTensor) else np.asarray(src, NUMPY[dst.dtype])
        )
        partial_write(machine, instr, dst, chosen, values)

    return execute


def partial_write(machine: "Machine", instr: Instr, dst: NkiTensor, chosen: Array, values: Array) -> None:
    """Write the chosen elements of dst only, and count only them as written."""
    offset = machine.locate(dst, instr)
    if offset is None:
        return
    cell = machine.cell(dst.storage)
    np.copyto(cell.array(dst, offset), cast(values, NUMPY[dst.dtype]), where=chosen)
    if cell.written is not None:
        part = cell.over(cell.written, dst, offset)
        np.copyto(part, True, where=chosen if part.ndim == chosen.ndim else chosen[..., None])
        cell.missing = cell.written.size - int(np.count_nonzero(cell.written))


# -- element-wise -----------------------------------------------------------------------------------------------------
@instruction(
    "VG", dst=out(), data1=tile(), data2=tile(), same=("dst", "data1", "data2"), not_both_psum=("data1", "data2")
)
def tensor_tensor(dst: Any, data1: Any, data2: Any, op: Op, engine: Engine = Engine.unknown) -> Any:
    """dst = data1 <op> data2. All-int32/uint32 operands go to GpSimd, which is exact; else through float32."""
    need_op("tensor_tensor", op)
    views = (dst, data1, data2)
    if op.bitvec:
        rule(
            all(v.dtype in INTS for v in views),
            "dtype",
            lambda: f"tensor_tensor: {op} works on integers; got {', '.join(map(repr, views))}",
        )
        return lambda a, b: alu(op, like(a, dst), like(b, dst)), "V"
    psum = any(v.buffer is MemoryRegion.psum for v in views)
    wide = all(v.dtype in ("int32", "uint32") for v in views)
    letter = "G" if engine is Engine.gpsimd or (engine is Engine.unknown and wide and not psum) else "V"
    if op.name == "power":
        rule(
            not psum and engine is not Engine.vector,
            "engine-buffer",
            lambda: "tensor_tensor: nl.power runs on GpSimd, which cannot reach PSUM",
        )
        letter = "G"
    if letter == "G" and wide and op.name in ("add", "subtract", "multiply", "maximum", "minimum"):
        return lambda a, b: alu(op, like(a, dst), like(b, dst)), letter
    return lambda a, b: alu(op, like(f32(a), dst), like(f32(b), dst)), letter


SCALAR_ENGINE_PAIRS = (("multiply", "add"), ("multiply", None), ("add", None))


@instruction(
    "VSG",
    dst=out(),
    data=tile(),
    operand0=scalar_or_column(None, optional=True),
    operand1=scalar_or_column(None, optional=True),
    same=("dst", "data"),
)
def tensor_scalar(
    dst: Any,
    data: Any,
    op0: Op,
    operand0: Any,
    reverse0: bool = False,
    op1: Op | None = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
) -> Any:
    """dst = (data <op0> operand0) <op1> operand1, operands constants or one value a partition."""
    need_op("tensor_scalar", op0)
    if op1 is not None:
        need_op("tensor_scalar", op1, bitvec=op0.bitvec)
    rule(op1 is not None or operand1 is None, "op", lambda: "tensor_scalar: operand1 is given without op1")
    given = [v for v in (operand0, operand1) if isinstance(v, NkiTensor)]
    if op0.bitvec:
        rule(
            engine in (Engine.unknown, Engine.vector),
            "engine",
            lambda: "tensor_scalar: bitwise operators run on the Vector Engine",
        )
        rule(
            all(v.dtype in INTS for v in (dst, data, *given)),
            "dtype",
            lambda: f"tensor_scalar: {op0} works on integers; got {dst!r}, {data!r}",
        )
    else:
        rule(
            all(v.dtype == "float32" for v in given),
            "dtype",
            lambda: f"tensor_scalar: operand tensors must be float32; got {', '.join(map(repr, given))}",
        )
    if engine is Engine.scalar:
        pair = (op0.name, op1.name if op1 else None)
        rule(
            pair in SCALAR_ENGINE_PAIRS,
            "op",
            lambda: (
                f"tensor_scalar: the Scalar Engine of trn2 does multiply-add, multiply or add; got {pair}. Use engine.vector"
            ),
        )
    if engine is Engine.gpsimd:
        rule(
            op0.name == "rsqrt" and op1 is None,
            "op",
            lambda: "tensor_scalar: GpSimd does rsqrt only; use engine.vector",
        )
    letter = (
        "G"
        if op0.name == "rsqrt" and engine is Engine.unknown and MemoryRegion.psum not in (dst.buffer, data.buffer)
        else {Engine.scalar: "S", Engine.gpsimd: "G"}.get(engine, "V")
    )

    def compute(x: Array, *rest: Array) -> Array:
        x = like(x, dst)
        if op0.bitvec:
            tiles = iter(rest)
            a, b = (
                like(next(tiles), dst)
                if isinstance(v, NkiTensor)
                else None
                if v is None
                else np.asarray(v).astype(x.dtype)
                for v in (operand0, operand1)
            )
        else:
            x = f32(x)
            a, b = operands(rest, dst, operand0, operand1)
            a, b = (np.float32(v) if isinstance(v, (int, float)) else v for v in (a, b))
        x = alu(op0, x, a, reverse0)
        return x if op1 is None else alu(op1, x, b, reverse1)

    return compute, letter


@instruction(
    "VG",
    dst=out(),
    data=tile(),
    operand0=scalar_or_column(None),
    operand1=tile(),
    same=("dst", "data", "operand1"),
    not_both_psum=("data", "operand1"),
)
def scalar_tensor_tensor(
    dst: Any, data: Any, op0: Op, operand0: Any, op1: Op, operand1: Any, reverse0: bool = False, reverse1: bool = False
) -> Any:
    """dst = (data <op0> operand0) <op1> operand1, operand1 a tile."""
    need_op("scalar_tensor_tensor", op0, bitvec=False)
    need_op("scalar_tensor_tensor", op1, bitvec=False)

    def compute(x: Array, *rest: Array) -> Array:
        (a,) = operands(rest[:-1], dst, operand0)
        return alu(op1, alu(op0, like(f32(x), dst), a, reverse0), like(f32(rest[-1]), dst), reverse1)

    return compute


@instruction("V", dst=out(), data=tile(), same=("dst", "data"))
def reciprocal(dst: Any, data: Any) -> Any:
    """dst = 1 / data."""
    return lambda x: 1 / f32(x)


# -- reductions -------------------------------------------------------------------------------------------------------
@instruction("VG", dst=out(), data=tile())
def tensor_reduce(dst: Any, op: Op, data: Any, axis: Any, negate: bool = False, keepdims: bool = False) -> Any:
    """Reduce the trailing free axes."""
    need_op("tensor_reduce", op)
    rule(op.reduce is not None, "op", lambda: f"tensor_reduce: {op} is no reduction")
    axes = sorted(a % data.ndim for a in ([axis] if isinstance(axis, int) else axis))
    rule(
        bool(axes) and axes == list(range(axes[0], data.ndim)) and axes[0] > 0,
        "axis",
        lambda: (
            f"tensor_reduce: axis {axis} must be the last free axes of {data.shape}; axis 0 is the partition (use nc_transpose, nc_matmul with ones, or tensor_partition_reduce)"
        ),
    )
    kept = data.shape[: axes[0]]
    rule(
        dst.shape[0] == kept[0] and dst.size == int(np.prod(kept)),
        "shape",
        lambda: f"tensor_reduce: dst {dst.shape} must hold {kept}, data {data.shape} without axes {axes}",
    )
    rule(
        not op.bitvec or (not negate and dst.dtype in INTS and data.dtype in INTS),
        "dtype",
        lambda: f"tensor_reduce: {op} works on integers and cannot negate",
    )

    def compute(x: Array) -> Array:
        x = x if op.bitvec else f32(x)
        reduced = fold(op, x.reshape(int(np.prod(kept)), -1))
        return -reduced if negate else reduced

    return compute


@instruction(
    "V",
    dst=out(),
    data=tile(),
    operand0=scalar_or_column(),
    reduce_init=scalar_or_column(optional=True),
    reduce_res=out(optional=True, column=True),
    same=("dst", "data"),
    special=True,
)
def tensor_scalar_reduce(
    dst: Any,
    data: Any,
    op0: Op,
    operand0: Any,
    reduce_op: Op,
    reduce_res: Any = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
) -> Any:
    """dst = data <op0> operand0, folded over the free axes into the reduce registers."""
    need_op("tensor_scalar_reduce", op0, bitvec=False)
    check_reduce("tensor_scalar_reduce", reduce_op, ("add", "multiply", "maximum", "minimum"), reduce_cmd, reduce_init)
    rule(
        not reverse0,
        "op",
        lambda: "tensor_scalar_reduce: reverse0 is not supported by NKI; swap the operands or use tensor_scalar",
    )

    def body(x: Array, *rest: Array) -> Array:
        (a,) = operands(rest, dst, operand0)
        return alu(op0, like(f32(x), dst), a)

    return reducing(
        body,
        lambda i: {
            "op": reduce_op,
            "cmd": reduce_cmd,
            "res": reduce_res,
            "init": reduce_init,
            "negate": reduce_res_negate,
        },
    )


@instruction(
    "V",
    dst=out(),
    on_true=tile(),
    predicate=tile(dtypes=("int8", "uint8", "int16", "uint16")),
    on_false=scalar_or_column(None),
    reduce_res=out(dtypes=FLOATS, optional=True, column=True),
    same=("dst", "on_true", "predicate"),
    not_both_psum=("on_true", "predicate"),
    special=True,
)
def select_reduce(
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: Op = OPS["maximum"],
    reverse_pred: bool = False,
) -> Any:
    """dst = on_true where the predicate holds, else on_false; optionally the maximum over the free axes."""
    check_reduce("select_reduce", reduce_op, ("maximum",), reduce_cmd)
    rule(on_true.dtype not in ("int32", "uint32"), "dtype", lambda: f"select_reduce: on_true cannot be {on_true.dtype}")

    def body(x: Array, p: Array, *rest: Array) -> Array:
        (other,) = operands(rest, dst, on_false)
        chosen = like(p, dst) != 0
        return np.where(~chosen if reverse_pred else chosen, like(f32(x), dst), other)

    return reducing(body, lambda i: {"op": reduce_op, "cmd": reduce_cmd, "res": reduce_res})


@instruction(
    "V",
    dst=out(),
    on_true_tile=tile(dtypes=FLOATS),
    bound0=column(("float32",)),
    bound1=column(("float32",)),
    reduce_res=out(optional=True, column=True),
    same=("dst", "on_true_tile"),
    special=True,
)
def range_select(
    dst: Any,
    on_true_tile: Any,
    comp_op0: Op,
    comp_op1: Op,
    bound0: Any,
    bound1: Any,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Op = OPS["maximum"],
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
) -> Any:
    """Keep elements whose index (range_start + position) satisfies both comparisons; the others become the lowest float32."""
    check_reduce("range_select", reduce_op, ("maximum",), reduce_cmd)
    rule(
        all(isinstance(c, Op) and c.name in COMPARISONS for c in (comp_op0, comp_op1)),
        "op",
        lambda: f"range_select: comparisons are {', '.join(COMPARISONS)}; got {comp_op0!r}, {comp_op1!r}",
    )
    rule(
        np.float32(on_false_value) == np.float32(FP32_MIN),
        "value",
        lambda: f"range_select: on_false_value must be the lowest float32 ({FP32_MIN}); got {on_false_value}",
    )
    rule(
        range_start + on_true_tile.free_size <= 2**24,
        "value",
        lambda: "range_select: indices must stay below 2**24, where float32 counts exactly",
    )
    index = np.arange(range_start, range_start + on_true_tile.free_size, dtype=np.float32)

    def body(x: Array, low: Array, high: Array) -> Array:
        keep = (alu(comp_op0, index, line(low)) != 0) & (alu(comp_op1, index, line(high)) != 0)
        return np.where(keep, line(f32(x)), np.float32(FP32_MIN)).reshape(dst.shape)

    return reducing(body, lambda i: {"op": reduce_op, "cmd": reduce_cmd, "res": reduce_res})


@instruction(
    "V",
    dst=out(),
    data0=tile(),
    data1=tile(),
    initial=scalar_or_column(None),
    same=("dst", "data0", "data1"),
    not_both_psum=("data0", "data1"),
)
def tensor_tensor_scan(
    dst: Any, data0: Any, data1: Any, initial: Any, op0: Op, op1: Op, reverse0: bool = False, reverse1: bool = False
) -> Any:
    """r[i] = (data0[i] <op0> r[i-1]) <op1> data1[i], r[-1] = initial, along the free elements."""
    need_op("tensor_tensor_scan", op0, bitvec=False)
    need_op("tensor_tensor_scan", op1, bitvec=False)

    def compute(a: Array, b: Array, *rest: Array) -> Array:
        a, b = line(f32(a)).T, line(f32(b)).T
        state = line(f32(rest[0]))[:, 0] if rest else np.full(a.shape[1], initial, np.float32)
        result = np.empty_like(a)
        for i in range(len(a)):
            state = result[i] = alu(op1, alu(op0, a[i], state, reverse0), b[i], reverse1)
        return result.T

    return compute


@instruction(
    "V",
    dst=out(),
    src=tile(),
    imm0=scalar_or_column(),
    imm1=scalar_or_column(optional=True),
    same=("dst", "src"),
    special=True,
)
def tensor_scalar_cumulative(
    dst: Any, src: Any, op0: Op, op1: Op, imm0: Any, imm1: Any = None, reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce
) -> Any:
    """r[i] = (src[i] <op0> imm0) <op1> r[i-1], starting from the reduce registers."""
    need_op("tensor_scalar_cumulative", op0, bitvec=False)
    check_reduce(
        "tensor_scalar_cumulative", op1, ("add", "subtract", "multiply", "maximum", "minimum"), reduce_cmd, imm1
    )
    rule(
        "int32" not in (dst.dtype, src.dtype) and "uint32" not in (dst.dtype, src.dtype),
        "dtype",
        lambda: f"tensor_scalar_cumulative: no 32-bit integers; got {dst!r}, {src!r}",
    )

    def execute(machine: "Machine", instr: Instr) -> None:
        (a,) = operands((machine.read(imm0, instr),) if isinstance(imm0, NkiTensor) else (), src, imm0)
        values = line(alu(op0, f32(machine.read(src, instr)), a)).T
        accumulate(machine, instr, values.T, op1, {Cmd.reset_reduce: Cmd.reset}.get(reduce_cmd, Cmd.idle), None)
        lanes = slice(dst.partition, dst.partition + dst.shape[0])
        registers = machine.accumulators[machine.core, instr.engine]
        if reduce_cmd is Cmd.load_reduce:
            registers[lanes] = line(f32(machine.read(imm1, instr)))[:, 0] if isinstance(imm1, NkiTensor) else imm1
        state, result = registers[lanes].copy(), np.empty_like(values)
        for i in range(len(values)):
            state = result[i] = alu(op1, values[i], state)
        registers[lanes] = state
        machine.write(dst, result.T, instr)

    return execute


# -- statistics, search, shuffle --------------------------------------------------------------------------------------
@instruction("V", dst=out(), data=tile())
def bn_stats(dst: Any, data: Any) -> Any:
    """Count, mean and variance * count of the even elements of each partition, then of the odd ones."""
    rule(
        data.free_size <= BN_STATS_FREE,
        "bn-stats-free",
        lambda: (
            f"bn_stats: data {data.shape} has {data.free_size} elements per partition; at most {BN_STATS_FREE}. Call it per slice and bn_aggr over all"
        ),
    )
    rule(
        dst.shape[0] == data.shape[0] and dst.free_size == 6,
        "shape",
        lambda: f"bn_stats: dst {dst.shape} must be ({data.shape[0]}, 6)",
    )

    def compute(x: Array) -> Array:
        x = line(f32(x))
        parts = []
        for half in (x[:, 0::2], x[:, 1::2]):
            n = half.shape[1]
            mean = half.mean(axis=1) if n else np.zeros(len(x), np.float32)
            m2 = np.square(half - mean[:, None]).sum(axis=1)
            parts += [np.full(len(x), n, np.float32), mean, m2]
        return np.stack(parts, axis=1)

    return compute


@instruction("V", dst=out(), data=tile())
def bn_aggr(dst: Any, data: Any) -> Any:
    """Mean and variance from (count, mean, variance * count) triples."""
    rule(
        data.free_size % 3 == 0,
        "shape",
        lambda: f"bn_aggr: data {data.shape} must hold triples (count, mean, variance * count)",
    )
    rule(
        dst.shape[0] == data.shape[0] and dst.free_size == 2,
        "shape",
        lambda: f"bn_aggr: dst {dst.shape} must be ({data.shape[0]}, 2)",
    )

    def compute(x: Array) -> Array:
        count, mean, m2 = (line(f32(x))[:, i::3] for i in range(3))
        total = count.sum(axis=1)
        overall = (count * mean).sum(axis=1) / total
        variance = (m2 + count * np.square(mean - overall[:, None])).sum(axis=1) / total
        return np.stack([overall, variance], axis=1)

    return compute


def _search_size(title: str, view: NkiTensor) -> None:
    rule(
        SEARCH[0] <= view.free_size <= SEARCH[1],
        "search-size",
        lambda: (
            f"{title}: {view!r} has {view.free_size} elements per partition; {SEARCH[0]} to {SEARCH[1]} are allowed"
        ),
    )


@instruction("V", dst=out(), src=tile())
def max8(dst: Any, src: Any) -> Any:
    """The eight largest values of each partition, descending."""
    _search_size("max8", src)
    rule(dst.shape == (src.shape[0], 8), "shape", lambda: f"max8: dst {dst.shape} must be ({src.shape[0]}, 8)")
    return lambda x: -np.sort(-line(f32(x)), axis=1)[:, :8]


def _matches(x: Array, vals: Array, order: range) -> Array:
    """Positions [P, 8] of vals in x, each occurrence taken once, duplicates in `order`; -1 where there is none."""
    free = np.ones(x.shape, bool)
    found = np.full(vals.shape, -1, np.int64)
    lanes = np.arange(len(x))
    for k in order:
        hit = (x == vals[:, k : k + 1]) & free
        at = np.argmax(hit, axis=1)
        there = hit[lanes, at]
        found[there, k] = at[there]
        free[lanes[there], at[there]] = False
    return found


def _indices(found: Array, dtype: str) -> Array:
    """Indices, all ones where nothing matched."""
    return found.astype(NUMPY[dtype])  # type: ignore[index,no-any-return]


@instruction("V", dst=out(dtypes=("uint16", "uint32")), data=tile(), vals=tile())
def nc_find_index8(dst: Any, data: Any, vals: Any) -> Any:
    """Where the eight vals of each partition stand in data; equal vals take successive occurrences."""
    _search_size("nc_find_index8", data)
    rule(
        vals.free_size == 8 and dst.free_size == 8 and dst.shape[0] == data.shape[0] == vals.shape[0],
        "shape",
        lambda: f"nc_find_index8: vals {vals.shape} and dst {dst.shape} must be ({data.shape[0]}, 8)",
    )
    return lambda x, v: _indices(_matches(line(f32(x)), line(f32(v)), range(8)), dst.dtype)


@instruction(
    "V",
    dst=out(),
    data=tile(),
    vals=tile(),
    dst_idx=out(dtypes=("uint16", "uint32"), optional=True),
    same=("dst", "data"),
)
def nc_match_replace8(dst: Any, data: Any, vals: Any, imm: float, dst_idx: Any = None) -> Any:
    """data with one occurrence of each val replaced by imm; equal vals take occurrences from the last val backwards."""
    _search_size("nc_match_replace8", data)
    rule(
        vals.free_size == 8 and vals.shape[0] == data.shape[0],
        "shape",
        lambda: f"nc_match_replace8: vals {vals.shape} must be ({data.shape[0]}, 8)",
    )

    def compute(x: Array, v: Array) -> Any:
        x = line(f32(x)).copy()
        found = _matches(x, line(f32(v)), range(7, -1, -1))
        lane, k = np.nonzero(found >= 0)
        x[lane, found[lane, k]] = imm
        return x if dst_idx is None else (x, _indices(found, dst_idx.dtype))

    return compute


@instruction("V", dst=out(), src=tile(), same_dtype=("dst", "src"), special=True)
def nc_stream_shuffle(dst: Any, src: Any, shuffle_mask: Any) -> Any:
    """Within each 32 partitions, dst partition i takes src partition mask[i]; 255 leaves it as it is."""
    mask = [int(m) for m in shuffle_mask]
    rule(
        len(mask) == 32 and all(0 <= m < 32 or m == 255 for m in mask),
        "shuffle-mask",
        lambda: f"nc_stream_shuffle: the mask has 32 entries, 0..31 or 255; got {mask}",
    )
    rule(
        dst.free_size == src.free_size,
        "shape",
        lambda: f"nc_stream_shuffle: dst {dst.shape} and src {src.shape} must have the same elements per partition",
    )
    active = -(-max(dst.shape[0], src.shape[0]) // 32) * 32
    starts = (0,) if active > 64 else (0, 64) if active == 64 else (0, 32, 64, 96)
    for view in (dst, src):
        rule(
            view.partition in starts,
            "start-partition",
            lambda v=view: (
                f"nc_stream_shuffle: {v!r} starts at partition {v.partition}; with {active} active partitions it may start at {starts}"
            ),
        )

    def execute(machine: "Machine", instr: Instr) -> None:
        x = line(machine.read(src, instr))
        lanes = np.arange(dst.shape[0])
        wanted = np.array(mask)[lanes % 32]
        source = lanes // 32 * 32 + wanted
        keep = wanted == 255
        outside = ~keep & (source >= len(x))
        if outside.any():
            refuse(
                "shuffle-mask",
                f"nc_stream_shuffle: partition {int(lanes[outside][0])} takes partition {int(source[outside][0])} of a source with {len(x)}",
                instr.where,
            )
        values = x[np.where(keep | outside, 0, source)].reshape(dst.shape)
        chosen = np.broadcast_to((~keep).reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape)
        if keep.any():
            partial_write(machine, instr, dst, chosen, values)
        else:
            machine.write(dst, values, instr)

    return execute
