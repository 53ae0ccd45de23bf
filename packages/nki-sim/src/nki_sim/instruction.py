"""What every instruction shares, written once: its signature as data, and the checks that read it.

    @instruction("VG", same="dst data1 data2", dst=OUT, data1=IN, data2=IN, op=REQUIRED, engine=Engine.unknown)
    def tensor_tensor(a): ...

Keywords are the parameters in order: a Tile is a tensor, REQUIRED anything without a default, the rest are defaults. The
function gets them as `a`, refuses what is special to it with `need`, and returns `compute`: the arrays that are read, in
order, to the array written (float32 or exact; the machine converts).
"""

from collections.abc import Callable
from enum import Enum
from inspect import Parameter, Signature
from types import SimpleNamespace as Args
from typing import Any, NamedTuple

from nki_sim import errors
from nki_sim.constants import Engine
from nki_sim.errors import doing, kernel_line, misused, near, need
from nki_sim.limits import FREE_DIMENSIONS, PARTITIONS, start_partitions
from nki_sim.program import Instr, tracer
from nki_sim.tensor import MemoryRegion, NkiTensor

SBUF, PSUM = frozenset({MemoryRegion.sbuf}), frozenset({MemoryRegion.psum})
HBM = frozenset({MemoryRegion.private_hbm, MemoryRegion.shared_hbm})
ENGINES = {"T": "tensor", "V": "vector", "S": "scalar", "G": "gpsimd", "D": "dma", "Y": "sync"}
REQUIRED = object()
Compute = Callable[..., Any] | None


class Tile(NamedTuple):
    """What an operand may be. `column`: one element per partition; `scalar`: a number will do."""

    buffers: frozenset[MemoryRegion] = SBUF | PSUM
    dtypes: tuple[str, ...] | None = None
    write: bool = False
    optional: bool = False
    scalar: bool = False
    column: bool = False
    default: float | None = None  # of a number that may be left out


IN, OUT = Tile(), Tile(write=True)
OUT_COLUMN = Tile(write=True, optional=True, column=True)
COLUMN = Tile(dtypes=("float32",), scalar=True, column=True)  # a number, or float32 one per partition
INSTRUCTIONS: dict[str, Callable[..., Instr]] = {}


def instruction(
    engines: str,
    *,
    same: str = "",
    same_dtype: str = "",
    one_psum: str = "",
    special: bool = False,
    hidden: bool = False,
    **parameters: Any,
) -> Callable[[Callable[[Args], Any]], Callable[..., Instr]]:
    """Declare an instruction of these engines (T V S G, D DMA, Y sync; the first by default, or the one that the function
    returns beside `compute`). `same`: operands of equal partitions and elements per partition; `same_dtype`; `one_psum`:
    at most one of them in PSUM; `special`: compute(machine) does its own reading and writing; `hidden`: no name of nki.isa."""
    tiles = {n: p for n, p in parameters.items() if isinstance(p, Tile)}
    defaults = {n: p for n, p in parameters.items() if p is not REQUIRED and n not in tiles}
    defaults |= {n: t.default for n, t in tiles.items() if t.optional or t.default is not None}
    names, enums = list(parameters), {n: type(d) for n, d in defaults.items() if isinstance(d, Enum)}

    def decorate(body: Callable[[Args], Any]) -> Callable[..., Instr]:
        title = body.__name__.lstrip("_")

        def call(*args: Any, **kwargs: Any) -> Instr:
            kwargs.pop("name", None)
            bound = defaults | dict(zip(names, args, strict=False)) | kwargs
            wrong = [n for n in bound if n not in parameters] or [n for n in names if n not in bound]
            if wrong or len(args) > len(names) or any(n in kwargs for n in names[: len(args)]):
                raise misused(_misfit(title, names, args, kwargs, bound))
            for n, kind in enums.items():
                if not isinstance(bound[n], kind):
                    if not errors.compat or not isinstance(bound[n], int):
                        raise misused(f"nisa.{title}: {n} is a member of nisa.{kind.__name__}; got {bound[n]!r}")
                    bound[n] = kind(bound[n])  # NKI 0.3 took the numbers
            doing.append((title, None))
            try:
                a = Args(**{n: bound[n] for n in names})
                engine = bound.get("engine", Engine.unknown)
                letter = next((e for e in engines if ENGINES[e] == engine.name), engines[0])
                allowed = "D" in engines or engine is Engine.unknown or ENGINES[letter] == engine.name
                need(allowed, "engine", "runs on {}; got {}", ", ".join(ENGINES[e] for e in engines), engine)
                reads, writes = _operands(a, tiles, engines)
                _agree(a, same, same_dtype, one_psum)
                compute = body(a)
                compute, letter = compute if isinstance(compute, tuple) else (compute, letter)
                for view in (*reads, *writes) if letter == "G" else ():
                    need(view.buffer is not MemoryRegion.psum, "engine-buffer", "GpSimd cannot reach PSUM: {}", view)
                instr = Instr(title, ENGINES[letter], vars(a), reads, writes, kernel_line(), compute, special)
                return tracer().emit(instr)
            finally:
                doing.pop()

        call.__name__, call.__doc__, call.body, call.tiles = title, body.__doc__, body, tiles  # type: ignore[attr-defined]
        kind = Parameter.POSITIONAL_OR_KEYWORD
        call.__signature__ = Signature([Parameter(n, kind, default=defaults.get(n, Parameter.empty)) for n in names])  # type: ignore[attr-defined]
        if not hidden:
            INSTRUCTIONS[title] = call
        return call

    return decorate


def _misfit(title: str, names: list[str], args: Any, kwargs: dict[str, Any], bound: dict[str, Any]) -> str:
    """What is wrong with a call's arguments: unknown, missing, twice or too many."""
    call = f"nisa.{title}({', '.join(names)})"
    for n in kwargs:
        if n not in names:
            return f"{call} has no argument {n!r}{near(n, names)}"
    if len(args) > len(names):
        return f"{call} takes {len(names)} arguments; got {len(args)}"
    twice = [n for n in names[: len(args)] if n in kwargs]
    if twice:
        return f"{call} got {', '.join(twice)} twice, by place and by name"
    return f"{call} lacks {', '.join(n for n in names if n not in bound)}"


def _operands(a: Args, tiles: dict[str, Tile], engines: str) -> tuple[tuple[NkiTensor, ...], tuple[NkiTensor, ...]]:
    reads: list[NkiTensor] = []
    writes: list[NkiTensor] = []
    for name, tile in tiles.items():
        value = getattr(a, name)
        if value is None and tile.optional:
            continue
        for view in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(view, NkiTensor):
                _check(name, view, tile, engines)
                if tile.column:
                    good = view.free_size == 1 and view.shape[0] == a.dst.shape[0]
                    need(good, "shape", "{} {} must be ({}, 1): one a partition", name, view, a.dst.shape[0])
                (writes if tile.write else reads).append(view)
            elif not (tile.scalar and (isinstance(view, (int, float)) or getattr(view, "shape", None) == ())):
                raise misused(f"operand: nisa.{doing[-1][0]} needs a tensor for {name}; got {view!r}")
    return tuple(reads), tuple(writes)


def _check(name: str, view: NkiTensor, tile: Tile, engines: str) -> None:
    need(
        view.buffer in tile.buffers, "buffer", "{} {} must be in {}", name, view, sorted(b.value for b in tile.buffers)
    )
    need(tile.dtypes is None or view.dtype in tile.dtypes, "dtype", "{} {} must be of {}", name, view, tile.dtypes)
    once = not tile.write or all(s or n == 1 for s, n in zip(view.strides, view.shape, strict=True))
    need(once, "broadcast-write", "{} repeats addresses (stride 0): {}", name, view.get_pattern())
    if not view.buffer.on_chip:
        return
    n, dims, index = view.shape[0], _free_dims(view), view.indirect_index
    need(n <= PARTITIONS, "partitions", "{} {} has {} partitions of {}; split dimension 0", name, view, n, PARTITIONS)
    fix = "hardware access patterns have 4; split the instruction"
    need(dims <= FREE_DIMENSIONS, "access-pattern", "{} {} needs {} free dimensions, {}", name, view, dims, fix)
    if engines[0] != "D" and "Y" not in engines:
        known = not (index and index.dim == 0)
        found, rule = "{} {} starts at partition {}", "of {} partitions: {} (> 64: 0; > 32: 0, 64; else 0, 32, 64, 96)"
        good = not known or view.partition in start_partitions(n)
        need(good, "start-partition", f"{found}, {rule}", name, view, view.partition, n, start_partitions(n))


def _agree(a: Args, same: str, same_dtype: str, one_psum: str) -> None:
    def views(names: str) -> list[NkiTensor]:
        return [v for v in (getattr(a, n) for n in names.split()) if isinstance(v, NkiTensor)]

    sizes = {(v.shape[0], v.free_size) for v in views(same)}
    need(len(sizes) < 2, "shape", "{} must agree in partitions and elements per partition; got {}", same, views(same))
    need(len({v.dtype for v in views(same_dtype)}) < 2, "dtype", "{} must agree; got {}", same_dtype, views(same_dtype))
    psum = [v for v in views(one_psum) if v.buffer is MemoryRegion.psum]
    need(len(psum) < 2, "engine-buffer", "{} cannot both be in PSUM; copy one to SBUF", one_psum)


def _free_dims(view: NkiTensor) -> int:
    """Free dimensions an access pattern needs once neighbours that lie end to end are one."""
    count, expected = 0, None
    for stride, n in reversed(list(zip(view.strides[1:], view.shape[1:], strict=True))):
        if n > 1:
            count += stride != expected
            expected = stride * n
    return count
