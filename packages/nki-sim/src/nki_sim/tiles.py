"""nl's functions on tiles: each allocates its result and emits one to a few instructions of nki.isa.

Results are SBUF tiles like the (first) tile, in its dtype unless `dtype` says otherwise; comparisons give uint8. How AWS's functions are
built is not public: values agree, instructions and so costs may not.
"""

from collections.abc import Callable, Sequence
from math import pi, prod
from typing import Any

from nki_sim.dtypes import as_dtype
from nki_sim.errors import need, unsupported
from nki_sim.instruction import INSTRUCTIONS
from nki_sim.limits import MOVING_FREE
from nki_sim.ops import FUNCTIONS, OPS, Op
from nki_sim.program import tracer
from nki_sim.tensor import MemoryRegion, NkiTensor

COMPARISONS = (
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "logical_and",
    "logical_or",
    "logical_xor",
)
ACTIVATIONS = [n for n, op in OPS.items() if op.activation and n not in ("copy", "sin", "reciprocal")]
BINARY = [n for n, op in OPS.items() if op.alu and not op.unary and n not in ("divide", "mod", "fmod")]


def isa(name: str, *args: Any, **kwargs: Any) -> Any:
    """Emit an instruction."""
    return INSTRUCTIONS[name](*args, **kwargs)


def new(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = MemoryRegion.sbuf) -> NkiTensor:
    """A tile, nothing written in it."""
    return tracer().allocate(tuple(shape), as_dtype(dtype), buffer, "")


def _tile(x: Any, name: str) -> NkiTensor:
    if not isinstance(x, NkiTensor):
        raise TypeError(f"nl.{name} needs a tile; got {x!r}")
    need(x.buffer.on_chip, "buffer", "nl.{} works on tiles in SBUF or PSUM; nl.load {} first", name, x)
    return x


def _axes(x: NkiTensor, axis: Any) -> tuple[int, ...]:
    return tuple(sorted(i % x.ndim for i in ([axis] if isinstance(axis, int) else axis)))


def binary(op: Op) -> Callable[..., NkiTensor]:
    """The function on tiles, columns and numbers of an ALU operator."""

    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        flipped = not isinstance(x, NkiTensor)
        tile, other = (y, x) if flipped else (x, y)
        _tile(tile, op.name)
        kind = dtype or ("uint8" if op.name in COMPARISONS else tile.dtype)
        if not isinstance(other, NkiTensor):
            result = new(tile.shape, kind)
            isa("tensor_scalar", result, tile, op, other, reverse0=flipped)
            return result
        _tile(other, op.name)
        shape = _common(tile, other, op.name)
        tile, other = broadcast_to(tile, shape), broadcast_to(other, shape)
        if tile.buffer is MemoryRegion.psum and other.buffer is MemoryRegion.psum:
            other = copy(other)
        result = new(shape, kind)
        isa("tensor_tensor", result, tile, other, op)
        return result

    return _named(
        function, op.name, f"x {op.name} y, element by element; tiles broadcast, and one of them may be a number."
    )


def _common(x: NkiTensor, y: NkiTensor, name: str) -> tuple[int, ...]:
    fits = x.ndim == y.ndim and all(1 in (a, b) or a == b for a, b in zip(x.shape, y.shape, strict=True))
    need(fits and x.shape[0] == y.shape[0], "shape", "nl.{}: {} and {} do not broadcast", name, x, y)
    return tuple(max(a, b) for a, b in zip(x.shape, y.shape, strict=True))


def divide(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x / y: the Vector Engine's reciprocal, and a product."""
    if not isinstance(y, NkiTensor):
        return FUNCTIONS["multiply"](x, 1 / y, dtype)
    turned = new(_tile(y, "divide").shape, "float32")
    isa("reciprocal", turned, y)
    return FUNCTIONS["multiply"](x, turned, dtype or (x.dtype if isinstance(x, NkiTensor) else y.dtype))


def activation(op: Op) -> Callable[..., NkiTensor]:
    """The function on tiles of the Scalar Engine's."""

    def function(x: Any, dtype: Any = None) -> NkiTensor:
        result = new(_tile(x, op.name).shape, dtype or x.dtype)
        isa("activation", result, op, x)
        return result

    return _named(function, op.name, f"{op.name}(x), element by element, on the Scalar Engine.")


def _named(function: Callable[..., NkiTensor], name: str, words: str) -> Callable[..., NkiTensor]:
    function.__name__, function.__doc__ = name, words
    return function


def copy(x: Any, dtype: Any = None) -> NkiTensor:
    """x in a new SBUF tile."""
    result = new(_tile(x, "copy").shape, dtype or x.dtype)
    isa("tensor_copy", result, x)
    return result


def reciprocal(x: Any, dtype: Any = None) -> NkiTensor:
    """1 / x on the Vector Engine."""
    result = new(_tile(x, "reciprocal").shape, dtype or x.dtype)
    isa("reciprocal", result, x)
    return result


def negative(x: Any, dtype: Any = None) -> NkiTensor:
    """-x."""
    return FUNCTIONS["multiply"](x, -1.0, dtype)


def invert(x: Any, dtype: Any = None) -> NkiTensor:
    """The bits of x, each turned."""
    result = new(_tile(x, "invert").shape, dtype or x.dtype)
    isa("tensor_scalar", result, x, OPS["invert"], None)
    return result


def logical_not(x: Any, dtype: Any = None) -> NkiTensor:
    """x == 0."""
    return FUNCTIONS["equal"](x, 0.0, dtype)


def floor(x: Any, dtype: Any = None) -> NkiTensor:
    """The largest integer not above x, for |x| < 2**31: rounded to an integer, and one less where that went up."""
    whole, back = new(_tile(x, "floor").shape, "int32"), new(x.shape, "float32")
    isa("tensor_copy", whole, x)
    isa("tensor_copy", back, whole)
    up = FUNCTIONS["greater"](back, x, "float32")
    return FUNCTIONS["subtract"](back, up, dtype or x.dtype)


def ceil(x: Any, dtype: Any = None) -> NkiTensor:
    """The smallest integer not below x, for |x| < 2**31."""
    return negative(floor(negative(x, "float32"), "float32"), dtype or x.dtype)


def trunc(x: Any, dtype: Any = None) -> NkiTensor:
    """x without its fraction, for |x| < 2**31."""
    return FUNCTIONS["multiply"](
        FUNCTIONS["sign"](x, "float32"), floor(FUNCTIONS["abs"](x, "float32")), dtype or x.dtype
    )


def sin(x: Any, dtype: Any = None) -> NkiTensor:
    """sin(x) for any x: first brought into [-pi, pi], which the Scalar Engine does not do."""
    turns, back = new(_tile(x, "sin").shape, "int32"), new(x.shape, "float32")
    isa("tensor_scalar", turns, x, OPS["multiply"], 1 / (2 * pi))
    isa("tensor_scalar", back, turns, OPS["multiply"], -2 * pi)
    isa("tensor_tensor", back, back, x, OPS["add"])
    result = new(x.shape, dtype or x.dtype)
    isa("activation", result, OPS["sin"], back)
    return result


def cos(x: Any, dtype: Any = None) -> NkiTensor:
    """cos(x) for any x."""
    return sin(FUNCTIONS["add"](x, pi / 2, "float32"), dtype or x.dtype)


def tan(x: Any, dtype: Any = None) -> NkiTensor:
    """sin(x) / cos(x)."""
    return divide(sin(x, "float32"), cos(x, "float32"), dtype or x.dtype)


def reduction(name: str, op: str) -> Callable[..., NkiTensor]:
    """The function that folds the last free axes with an ALU operator."""

    def function(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
        axes = _axes(_tile(x, name), axis)
        kept = [n for i, n in enumerate(x.shape) if i not in axes]
        shape = [1 if i in axes else n for i, n in enumerate(x.shape)] if keepdims or len(kept) < 2 else kept
        shape = shape if keepdims or len(kept) > 1 else [x.shape[0], 1]  # on chip there is a free dimension
        result = new(shape, dtype or x.dtype)
        isa("tensor_reduce", result, OPS[op], x, axis=axes)
        return result

    return _named(function, name, f"The {name} over the last free axes: one, or several that end with the last.")


sum_, max_, min_, prod_ = (
    reduction(n, o) for n, o in (("sum", "add"), ("max", "maximum"), ("min", "minimum"), ("prod", "multiply"))
)


def mean(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The mean over the last free axes."""
    count = prod(x.shape[i] for i in _axes(x, axis))
    return FUNCTIONS["multiply"](sum_(x, axis, "float32", keepdims), 1 / count, dtype or x.dtype)


def var(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The variance over the last free axes (of all of them, as numpy's)."""
    apart = FUNCTIONS["subtract"](x, mean(x, axis, "float32", True), "float32")
    return mean(FUNCTIONS["square"](apart), axis, dtype or x.dtype, keepdims)


def all_(x: Any, axis: Any, dtype: Any = None) -> NkiTensor:
    """Whether all elements over the last free axes are nonzero."""
    return min_(FUNCTIONS["not_equal"](x, 0.0), axis, dtype)


def softmax(x: Any, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """exp(x - max) over its sum, along the last free axes."""
    apart = FUNCTIONS["subtract"](x, max_(x, axis, "float32", True), "float32")
    grown = FUNCTIONS["exp"](apart)
    return divide(grown, sum_(grown, axis, "float32", True), dtype or x.dtype)


def rms_norm(
    x: Any, w: Any, axis: Any, n: int, epsilon: float = 1e-6, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """x w / sqrt(sum(x^2) / n + epsilon), summed along the last free axes."""
    squares = FUNCTIONS["multiply"](sum_(FUNCTIONS["square"](x, "float32"), axis, "float32", True), 1 / n)
    scaled = FUNCTIONS["multiply"](
        x, FUNCTIONS["rsqrt"](FUNCTIONS["add"](squares, epsilon)), compute_dtype or "float32"
    )
    return FUNCTIONS["multiply"](scaled, w, dtype or x.dtype)


def where(condition: Any, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x where the condition holds, else y; x and y tiles or numbers."""
    kind = dtype or next((v.dtype for v in (x, y) if isinstance(v, NkiTensor)), "float32")
    if condition.dtype not in ("uint8", "uint16", "uint32"):
        condition = FUNCTIONS["not_equal"](condition, 0.0)
    result = new(condition.shape, kind)
    if isinstance(y, NkiTensor):
        isa("tensor_copy", result, broadcast_to(y, condition.shape))
    else:
        isa("memset", result, y)
    chosen = x if not isinstance(x, NkiTensor) or x.dtype == kind else copy(x, kind)
    isa(
        "tensor_copy_predicated",
        result,
        broadcast_to(chosen, condition.shape) if isinstance(chosen, NkiTensor) else chosen,
        condition,
    )
    return result


def broadcast_to(x: Any, shape: Sequence[int], dtype: Any = None) -> NkiTensor:
    """A view of x whose dimensions of size 1 repeat; a copy where the dtype differs."""
    need(
        _tile(x, "broadcast_to").ndim == len(shape),
        "shape",
        "nl.broadcast_to: {} has another rank than {}",
        x,
        tuple(shape),
    )
    if x.shape[0] == 1 != shape[0]:
        x = _over_partitions(x, shape[0])
    for dim, n in enumerate(shape):
        need(x.shape[dim] in (1, n), "shape", "nl.broadcast_to: {} does not broadcast to {}", x, tuple(shape))
        x = x.broadcast(dim, n) if x.shape[dim] != n else x
    return x if dtype in (None, x.dtype) else copy(x, dtype)


def _over_partitions(x: NkiTensor, partitions: int) -> NkiTensor:
    """The one partition of x on many: a column of ones times x, 512 columns at a time, on the Tensor Engine."""
    result, flat = new((partitions, *x.shape[1:]), x.dtype), x.reshape((1, x.free_size))
    ones, into = new((1, partitions), x.dtype), result.reshape((partitions, x.free_size))
    isa("memset", ones, 1.0)
    for at in range(0, x.free_size, MOVING_FREE):
        end = min(at + MOVING_FREE, x.free_size)
        product = new((partitions, end - at), "float32", MemoryRegion.psum)
        isa("nc_matmul", product, ones, flat[:, at:end])
        isa("tensor_copy", into[:, at:end], product)
    return result


def expand_dims(x: Any, axis: Any) -> NkiTensor:
    """A view of x with dimensions of size 1 at `axis`."""
    for dim in sorted([axis] if isinstance(axis, int) else axis):
        x = x.expand_dim(dim if dim >= 0 else dim + x.ndim + 1)
    return x


def transpose(x: Any, dtype: Any = None) -> NkiTensor:
    """x turned, to 128 x 128, by the Tensor Engine."""
    turned = new((x.free_size, x.shape[0]), _tile(x, "transpose").dtype, MemoryRegion.psum)
    isa("nc_transpose", turned, x)
    return copy(turned, dtype or x.dtype)


def load_transpose2d(src: Any, dtype: Any = None) -> NkiTensor:
    """A 2-D HBM tensor turned, in SBUF (dma_transpose)."""
    result = new((src.shape[1], src.shape[0]), src.dtype)
    isa("dma_transpose", result, src)
    return result if dtype in (None, src.dtype) else copy(result, dtype)


def matmul(x: Any, y: Any, transpose_x: bool = False) -> NkiTensor:
    """x @ y, or x.T @ y for an x that is turned already, in PSUM.

    Args:
        x: (M, K) or, turned, (K, M); M and K to 128.
        y: (K, N), N to 512.
        transpose_x: whether x is turned already.
    """
    x = x if transpose_x else transpose(_tile(x, "matmul"))
    result = new((x.free_size, y.free_size), "float32", MemoryRegion.psum)
    isa("nc_matmul", result, x, y)
    return result


def _unmodelled(name: str) -> Callable[..., NkiTensor]:
    def function(*_: Any, **__: Any) -> NkiTensor:
        unsupported(f"nl.{name}(...)", "as a function on tiles, is not modelled by nki-sim")

    return _named(function, name, "Not modelled.")


FUNCTIONS.update({n: activation(OPS[n]) for n in ACTIVATIONS})
FUNCTIONS.update({n: binary(OPS[n]) for n in BINARY})
FUNCTIONS.update({f.__name__: f for f in (divide, copy, reciprocal, invert, logical_not, sin)})
FUNCTIONS.update({n: _unmodelled(n) for n in OPS if n not in FUNCTIONS})
# What is no operator as well; language.py takes these names.
NAMES: dict[str, Callable[..., NkiTensor]] = {"sum": sum_, "max": max_, "min": min_, "prod": prod_, "all": all_}
NAMES |= {f.__name__: f for f in (negative, floor, ceil, trunc, cos, tan, mean, var, softmax, rms_norm, where)}
NAMES |= {f.__name__: f for f in (broadcast_to, expand_dims, transpose, load_transpose2d, matmul)}
