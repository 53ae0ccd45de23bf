"""The rules every instruction shares, written once: @instruction says which engines run it and what its operands may be, and
the checks below read that. What is special to an instruction stands in its own function, in isa/.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nki_sim.errors import kernel_line, refuse
from nki_sim.constants import engine as Engine
from nki_sim.limits import FREE_DIMENSIONS, PARTITIONS, start_partitions
from nki_sim.program import Instr, tracer
from nki_sim.tensor import MemoryRegion, NkiTensor

__all__ = ["HBM", "PSUM", "SBUF", "Tile", "column", "instruction", "out", "rule", "scalar_or_column", "tile"]

SBUF, PSUM = frozenset({MemoryRegion.sbuf}), frozenset({MemoryRegion.psum})
HBM = frozenset({MemoryRegion.private_hbm, MemoryRegion.shared_hbm})
ON_CHIP = SBUF | PSUM
ENGINES = {
    "T": Engine.tensor,
    "V": Engine.vector,
    "S": Engine.scalar,
    "G": Engine.gpsimd,
    "D": Engine.dma,
    "Y": Engine.sync,
}


@dataclass(frozen=True)
class Tile:
    """What an operand may be. `column`: one element per partition; `scalar`: a number is allowed as well."""

    buffers: frozenset[MemoryRegion] = ON_CHIP
    dtypes: tuple[str, ...] | None = None
    write: bool = False
    optional: bool = False
    scalar: bool = False
    column: bool = False


def tile(buffers: frozenset[MemoryRegion] = ON_CHIP, dtypes: tuple[str, ...] | None = None, **flags: bool) -> Tile:
    """An operand that is read."""
    return Tile(buffers, dtypes, **flags)


def out(buffers: frozenset[MemoryRegion] = ON_CHIP, dtypes: tuple[str, ...] | None = None, **flags: bool) -> Tile:
    """An operand that is written."""
    return Tile(buffers, dtypes, write=True, **flags)


def column(dtypes: tuple[str, ...] | None = None, **flags: bool) -> Tile:
    """One element per partition."""
    return Tile(dtypes=dtypes, column=True, **flags)


def scalar_or_column(dtypes: tuple[str, ...] | None = ("float32",), **flags: bool) -> Tile:
    """A number, or one element per partition."""
    return Tile(dtypes=dtypes, column=True, scalar=True, **flags)


def rule(holds: bool, name: str, message: Callable[[], str]) -> None:
    """Refuse under `name` unless it holds; the message is made only then."""
    if not holds:
        refuse(name, message())


def instruction(
    engines: str,
    *,
    same: tuple[str, ...] = (),
    same_dtype: tuple[str, ...] = (),
    not_both_psum: tuple[str, str] | None = None,
    special: bool = False,
    **operands: Tile,
) -> Callable[[Callable[..., Any]], Callable[..., Instr]]:
    """An instruction of `engines` (first = default: T V S G, D for DMA, Y for sync) over named operands.

    The decorated function checks what is special and returns `compute`: arrays of what is read, in the order of the
    operands, to the arrays of what is written (float32 or exact; the machine casts). It may set the engine by returning
    (compute, engine letter). `same`: operands with equal partitions and elements per partition.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Instr]:
        signature = inspect.signature(body)
        names = list(signature.parameters)
        defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}
        required = [n for n in names if n not in defaults]
        title = body.__name__

        @functools.wraps(body)
        def call(*args: Any, **kwargs: Any) -> Instr:
            trace = tracer()
            kwargs.pop("name", None)
            if len(args) > len(names):
                raise TypeError(f"{title} takes {', '.join(names)}; got {len(args)} positional arguments")
            bound = dict(zip(names, args, strict=False))
            for key in kwargs:
                if key not in signature.parameters or key in bound:
                    raise TypeError(
                        f"nisa.{title} has no (or already has) argument {key!r}; it takes {', '.join(names)}"
                    )
            bound = {**defaults, **bound, **kwargs}
            missing = [n for n in required if n not in bound]
            if missing:
                raise TypeError(
                    f"nisa.{title} misses {', '.join(missing)} (the destination comes first; instructions return no tile)"
                )
            letter = _engine(title, bound, engines)
            reads, writes = _operands(title, bound, operands, letter)
            _agree(title, bound, same, same_dtype, not_both_psum)
            result = body(**bound)
            compute, letter = result if isinstance(result, tuple) else (result, letter)
            if letter == "G":
                for view in (*reads, *writes):
                    rule(
                        view.buffer is not MemoryRegion.psum,
                        "engine-buffer",
                        lambda: f"{title}: GpSimd cannot reach PSUM; choose engine.vector or copy to SBUF",
                    )
            return trace.emit(Instr(title, ENGINES[letter].name, bound, reads, writes, kernel_line(), compute, special))

        call.operands = operands  # type: ignore[attr-defined]
        return call

    return decorate


def _engine(title: str, bound: dict[str, Any], engines: str) -> str:
    wanted = bound.get("engine", Engine.unknown)
    if wanted is Engine.unknown or "D" in engines:
        return engines[0]
    for letter in engines:
        if ENGINES[letter] is wanted:
            return letter
    refuse(
        "engine",
        f"{title} runs on {', '.join(ENGINES[e].name for e in engines)}; got engine {getattr(wanted, 'name', wanted)!r}",
    )
    return engines[0]


def _operands(
    title: str, bound: dict[str, Any], operands: dict[str, Tile], letter: str
) -> tuple[tuple[NkiTensor, ...], tuple[NkiTensor, ...]]:
    reads: list[NkiTensor] = []
    writes: list[NkiTensor] = []
    main = bound[next(iter(operands))] if operands else None
    for name, spec in operands.items():
        value = bound[name]
        if value is None and spec.optional:
            continue
        for view in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(view, NkiTensor):
                if (
                    spec.scalar
                    and isinstance(view, (int, float))
                    or hasattr(view, "dtype")
                    and getattr(view, "shape", None) == ()
                ):
                    continue
                raise TypeError(f"operand: nisa.{title} needs a tensor for {name}; got {view!r}")
            _check_tile(title, name, view, spec, letter)
            if spec.column and isinstance(main, NkiTensor):
                rule(
                    view.free_size == 1 and view.shape[0] == main.shape[0],
                    "shape",
                    lambda n=name, v=view: (
                        f"{title}: {n} must be ({main.shape[0]}, 1), one element per partition; got {v.shape}"
                    ),
                )
            (writes if spec.write else reads).append(view)
    return tuple(reads), tuple(writes)


def _check_tile(title: str, name: str, view: NkiTensor, spec: Tile, letter: str) -> None:
    at = f"{title}: {name} {view!r}"
    allowed = spec.buffers
    rule(
        view.buffer in allowed,
        "buffer",
        lambda: f"{at} must be in {' or '.join(sorted(b.value for b in allowed))}; copy it there first",
    )
    if spec.dtypes is not None:
        rule(view.dtype in spec.dtypes, "dtype", lambda: f"{at} must be one of {', '.join(spec.dtypes or ())}")
    if spec.write:
        rule(
            all(s or n == 1 for s, n in zip(view.strides, view.shape, strict=True)),
            "broadcast-write",
            lambda: (
                f"{at} repeats addresses (stride 0 in {view.get_pattern()}); a destination must address each element once"
            ),
        )
    if not view.buffer.on_chip:
        return
    rule(
        view.shape[0] <= PARTITIONS,
        "partitions",
        lambda: f"{at} has {view.shape[0]} partitions; a tile has at most {PARTITIONS}. Split the first dimension",
    )
    rule(
        _free_dims(view) <= FREE_DIMENSIONS,
        "access-pattern",
        lambda: (
            f"{at} needs {_free_dims(view)} free dimensions; hardware access patterns have {FREE_DIMENSIONS}. Split the instruction"
        ),
    )
    index = view.indirect_index
    if letter in "DY":
        return
    rule(
        index is None or index.kind == "scalar",
        "indirect",
        lambda: f"{at}: only DMA gathers and scatters by vector_offset",
    )
    if not (index and index.dim == 0):
        starts = start_partitions(view.shape[0])
        rule(
            view.partition in starts,
            "start-partition",
            lambda: (
                f"{at} starts at partition {view.partition}; {view.shape[0]} partitions may start at {', '.join(map(str, starts))} (> 64: 0; 33..64: 0, 64; <= 32: 0, 32, 64, 96)"
            ),
        )


def _agree(
    title: str,
    bound: dict[str, Any],
    same: tuple[str, ...],
    same_dtype: tuple[str, ...],
    not_both_psum: tuple[str, str] | None,
) -> None:
    views = {n: bound[n] for n in same if isinstance(bound[n], NkiTensor)}
    sizes = {(v.shape[0], v.free_size) for v in views.values()}
    rule(
        len(sizes) <= 1,
        "shape",
        lambda: (
            f"{title}: {', '.join(views)} must have the same partitions and elements per partition; got {', '.join(f'{n} {v.shape}' for n, v in views.items())}"
        ),
    )
    typed = {n: bound[n] for n in same_dtype if isinstance(bound[n], NkiTensor)}
    rule(
        len({v.dtype for v in typed.values()}) <= 1,
        "dtype",
        lambda: (
            f"{title}: {', '.join(typed)} must have one dtype; got {', '.join(f'{n} {v.dtype}' for n, v in typed.items())}"
        ),
    )
    if not_both_psum:
        pair = [bound[n] for n in not_both_psum]
        rule(
            not all(isinstance(v, NkiTensor) and v.buffer is MemoryRegion.psum for v in pair),
            "engine-buffer",
            lambda: f"{title}: {' and '.join(not_both_psum)} cannot both be in PSUM; copy one to SBUF",
        )


def _free_dims(view: NkiTensor) -> int:
    """Free dimensions an access pattern needs once neighbours that lie end to end are one."""
    count, expected = 0, None
    for stride, n in reversed(list(zip(view.strides[1:], view.shape[1:], strict=True))):
        if n == 1:
            continue
        if stride != expected:
            count += 1
        expected = stride * n
    return count
