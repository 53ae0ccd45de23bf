"""Tensors and views: a storage somewhere on the device, and strided access patterns over it. No data lives here.

A view is offset + sum(index * stride) in elements of its dtype, over a storage laid out row by row; on chip the first
dimension is the partition and its stride the storage's elements per partition. An indirect view adds an address known
only at run time: one for all (scalar_offset) or one a row (vector_offset).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from nki_sim import errors
from nki_sim.dtypes import INTS, DType, as_dtype
from nki_sim.errors import Where, misused, need
from nki_sim.limits import PATTERN_DIMENSIONS


class MemoryRegion(Enum):
    """Where a tensor lives (nl.hbm is the private one)."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def on_chip(self) -> bool:
        return self in (MemoryRegion.sbuf, MemoryRegion.psum)


@dataclass(eq=False)
class Storage:
    """One allocation. `key`, (core or "shared", number), names it in every run; `first` and `last` are the positions of its
    uses in the block of instructions that allocated it; `unit` is the grain in bytes at which writes are remembered."""

    key: tuple[int | str, int]
    shape: tuple[int, ...]
    dtype: DType
    buffer: MemoryRegion
    name: str
    where: Where | None
    address: Any = None  # (partition, byte)
    constant: np.ndarray | None = None
    first: int | None = None
    last: int | None = None
    unit: int = 0
    aliases: "list[Storage]" = field(default_factory=list)  # explicitly placed storages that share bytes with this one

    def __post_init__(self) -> None:
        # bytes of a partition on chip, of a row along the last dimension in HBM
        self.pitch = prod(self.shape[1:] if self.buffer.on_chip else self.shape[-1:]) * self.dtype.itemsize
        self.nbytes = prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"{self.buffer.value}{name} {self.shape} {self.dtype} (from {self.where})"


class VirtualRegister:
    """A number the device knows and Python does not."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _no(self, *_: Any) -> Any:
        why = "device-value: a register's value is unknown while tracing: Python cannot branch on, convert or compute with it"
        raise misused(f"{why}. Use nl.fori_loop, a scalar_offset, or compute in SBUF and nisa.register_load")

    __bool__ = __int__ = __index__ = __float__ = __iter__ = __len__ = __neg__ = __truediv__ = __rtruediv__ = _no
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = _no
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _no
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"r{self.number}"


@dataclass(frozen=True)
class DynamicSlice:
    """nl.ds(start, size): `size` elements from `start`, which may be a register."""

    start: Any
    size: int


class Indirect(NamedTuple):
    """The run-time part of an address: `scale` elements times what `source` holds; kind "scalar" or "vector"."""

    kind: str
    source: Any
    scale: int
    dim: int
    most: int | None = None  # the largest index, where it is one of a view's dimension

    def within(self, index: Any) -> Any:
        """Whether an index, or each of several, is one of the dimension's."""
        return True if self.most is None else (index >= 0) & (index <= self.most)


class NkiTensor:
    """A view of a storage. Methods return new views; nothing is copied."""

    __slots__ = ("dtype", "indirect_index", "offset", "shape", "storage", "strides")

    def __init__(
        self, storage: Storage, shape: Any, strides: Any, offset: int, dtype: DType, index: Indirect | None
    ) -> None:
        self.storage, self.offset, self.dtype = storage, offset, dtype
        self.indirect_index: Any = index
        self.shape, self.strides = tuple(shape), tuple(strides)

    # -- what it is ---------------------------------------------------------------------------------------------------
    buffer = property(lambda self: self.storage.buffer)
    name = property(lambda self: self.storage.name)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: prod(self.shape))
    free_size = property(lambda self: prod(self.shape[1:]))  # elements per partition

    @property
    def partition(self) -> int:
        """The first partition of an on-chip view."""
        start = self.storage.address[0] if self.storage.address else 0
        return start + self.offset * self.dtype.itemsize // self.storage.pitch

    @property
    def by_row(self) -> bool:
        """Whether rows are gathered or scattered by a vector_offset."""
        return self.indirect_index is not None and self.indirect_index.kind == "vector"

    def extent(self, skip: int = 0) -> int:
        """Elements from the first to the last one addressed, dimensions before `skip` left out."""
        return sum(s * (n - 1) for s, n in zip(self.strides[skip:], self.shape[skip:], strict=True))

    def holds(self, offset: int) -> bool:
        """Whether a view from there on stays in its storage; on chip, in each partition's own elements."""
        size, pitch = self.dtype.itemsize, self.storage.pitch
        inside = offset >= 0 and (offset + self.extent()) * size < self.storage.nbytes
        return inside and (not self.buffer.on_chip or offset * size % pitch + self.extent(1) * size < pitch)

    def is_contiguous(self) -> bool:
        """Whether elements follow each other in memory (on chip: within each partition)."""
        triples = list(zip(self.shape, self.strides, _row_major(self.shape), strict=True))
        return all(n == 1 or s == e for n, s, e in triples[1 if self.buffer.on_chip else 0 :])

    def is_indirect(self) -> bool:
        """Whether part of the address is known only at run time."""
        return self.indirect_index is not None

    def get_pattern(self) -> list[list[int]]:
        """[[stride, count], ...] in elements."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def __repr__(self) -> str:
        return f"{self.buffer.value}{list(self.shape)} {self.dtype}"

    def __bool__(self) -> bool:
        if errors.compat:  # NKI 0.3's front end: a tensor that is there is true
            return True
        return self._no()

    def __eq__(self, other: object) -> bool:
        return other is self if other is None or other is self or errors.compat else self._no()

    def _no(self, *_: object) -> NoReturn:
        why = "device-value: a tensor's values are not known while tracing: Python cannot branch on, convert or compute with them"
        raise misused(f"{why}. Use nisa's instructions, and range(tensor.shape[0]) to loop over slices")

    __hash__ = object.__hash__
    __iter__ = __int__ = __index__ = __float__ = __array__ = __lt__ = __le__ = __gt__ = __ge__ = _no
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _no

    def __setitem__(self, key: object, value: object) -> None:
        raise misused("assignment is no instruction; use nisa.dma_copy or nisa.tensor_copy with this slice as dst")

    # -- views --------------------------------------------------------------------------------------------------------
    def _with(self, shape: Any, strides: Any, offset: int | None = None, **new: Any) -> "NkiTensor":
        at = self.offset if offset is None else offset
        index = new.get("index", self.indirect_index)
        return NkiTensor(self.storage, shape, strides, at, new.get("dtype", self.dtype), index)

    def _replace(self, dim: int, n: tuple[int, ...], s: tuple[int, ...], offset: int = 0, **new: Any) -> "NkiTensor":
        """Dimension `dim` as other dimensions of sizes n and strides s."""
        shape = (*self.shape[:dim], *n, *self.shape[dim + 1 :])
        return self._with(shape, (*self.strides[:dim], *s, *self.strides[dim + 1 :]), self.offset + offset, **new)

    def _dim(self, dim: int, free: bool = False) -> int:
        """A valid dimension; not the indirect rows, and with `free` not the partition."""
        need(-self.ndim <= dim < self.ndim, "view", "dimension {} does not exist in {}", dim, self)
        dim %= self.ndim
        need(dim or not self.by_row, "view", "dimension 0 of {} is indirect and stays", self)
        need(dim or not (free and self.buffer.on_chip), "view", "dimension 0 of {} is the partition and stays", self)
        return dim

    def __getitem__(self, key: Any) -> "NkiTensor":
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(k is Ellipsis for k in keys):
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        need(len(keys) <= self.ndim, "view", "{} indices for {} with {} dimensions", len(keys), self, self.ndim)
        view, dim = self, 0
        for k in keys:
            n = view.shape[dim]
            if isinstance(k, slice):
                if k != slice(None):
                    start, stop = (v + n if v is not None and v < 0 else v for v in (k.start, k.stop))
                    view = view.slice(dim, start or 0, n if stop is None else stop, k.step or 1)
                dim += 1
            elif isinstance(k, DynamicSlice):
                view, dim = view._from(dim, k.start, k.size), dim + 1
            else:
                known = not isinstance(k, (VirtualRegister, NkiTensor))
                view, dim = view._from(dim, k % n if known and -n <= k < n else k, 1)._drop(dim)
        return view

    def _from(self, dim: int, start: Any, size: int) -> "NkiTensor":
        """`size` elements from a number, or from one that the device knows."""
        if not isinstance(start, (VirtualRegister, NkiTensor)):
            return self.slice(dim, start, start + size)
        need(self.indirect_index is None, "view", "{} is already indirect; one run-time address per view", self)
        need(size <= self.shape[dim], "out-of-bounds", "{} elements of dimension {} of {}", size, dim, self)
        _need_one(start)
        index = Indirect("scalar", start, self.strides[dim], dim, self.shape[dim] - size)
        return self._replace(dim, (size,), (self.strides[dim],), index=index)

    def _drop(self, dim: int) -> "tuple[NkiTensor, int]":
        """Return the view without a dimension of size 1, unless it must stay, and the next dimension to index."""
        stays = (self.buffer.on_chip and (dim == 0 or self.ndim == 2)) or self.ndim == 1
        return (self, dim + 1) if stays else (self._replace(dim, (), ()), dim)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        """Elements start, start + step, ... below end, along one dimension."""
        dim = self._dim(dim)
        n = self.shape[dim]
        inside = 0 <= start < end <= n and step >= 1
        need(inside, "out-of-bounds", "[{}:{}:{}] of dimension {} of {}, or empty", start, end, step, dim, self)
        stride = self.strides[dim]
        return self._replace(dim, (-(-(end - start) // step),), (stride * step,), start * stride)

    def select(self, dim: int, index: Any) -> "NkiTensor":
        """One element along a dimension, which disappears; the index may be on the device."""
        dim = self._dim(dim, free=not isinstance(index, int))
        return self._from(dim, index, 1)._drop(dim)[0]

    def vector_select(self, dim: int, vector_offset: "NkiTensor") -> "NkiTensor":
        """Row index[p] of dimension 0 for each partition p."""
        direct = dim == 0 and not self.buffer.on_chip and self.indirect_index is None
        need(direct, "view", "vector_select needs dimension 0 of a direct HBM tensor; got {} of {}", dim, self)
        index = Indirect("vector", vector_offset, self.strides[0], 0, self.shape[0] - 1)
        return self._replace(0, vector_offset.shape[:1], self.strides[:1], index=index)

    def permute(self, dims: Sequence[int]) -> "NkiTensor":
        """Dimensions in another order; on chip the partition stays first."""
        need(sorted(dims) == list(range(self.ndim)), "view", "{} is no permutation of {}", tuple(dims), self)
        if dims[0]:
            self._dim(0, free=True)
        return self._with([self.shape[d] for d in dims], [self.strides[d] for d in dims])

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        """Repeat a dimension of size 1."""
        dim = self._dim(dim, free=True)
        need(self.shape[dim] == 1, "view", "broadcast: dimension {} of {} is not of size 1", dim, self)
        return self._replace(dim, (size,), (0,))

    def expand_dim(self, dim: int) -> "NkiTensor":
        """A new dimension of size 1."""
        need(0 <= dim <= self.ndim, "view", "dimension {} cannot be inserted in {}", dim, self)
        if dim == 0:
            self._dim(0, free=True)
        return self._with((*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], 0, *self.strides[dim:]))

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        """Return the view without a dimension of size 1."""
        dim = self._dim(dim, free=True)
        need(self.shape[dim] == 1, "view", "squeeze_dim: dimension {} of {} is not of size 1", dim, self)
        return self._replace(dim, (), ())

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> "NkiTensor":
        """One dimension split into several; one of them may be -1."""
        new = _fill(shape, self.shape[self._dim(dim)])
        dim = self._dim(dim, free=len(new) > 1)
        return self._replace(dim, new, tuple(self.strides[dim] * s for s in _row_major(new)))

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        """Dimensions start..end (inclusive) as one."""
        end = self._dim(end_dim) + 1
        return self.reshape((*self.shape[:start_dim], prod(self.shape[start_dim:end]), *self.shape[end:]))

    def reshape(self, *shape: Any) -> "NkiTensor":
        """The same elements in the same order under another shape; refused when that would need a copy."""
        new = _fill(shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape, self.size)
        if new[0] != self.shape[0]:
            self._dim(0, free=True)
        strides = _reshape_strides(self.shape, self.strides, new)
        need(strides, "view", "reshape{}: {} with strides {} needs a copy; make one first", new, self, self.strides)
        return self._with(new, strides)

    def rearrange(self, src_pattern: tuple, dst_pattern: tuple, fixed_sizes: Any = None) -> "NkiTensor":
        """Split, reorder and merge dimensions by name: (("b", ("h", "w")), ("b", "w", "h"), {"h": 4})."""
        sizes: dict[str, int] = dict(fixed_sizes or {})
        names: list[str] = []
        view = self
        groups = [(g,) if isinstance(g, str) else g for g in src_pattern]
        for group in groups:
            unknown = view.shape[len(names)] if len(group) == 1 else -1
            view = view.reshape_dim(len(names), [sizes.get(g, unknown) for g in group])
            names.extend(group)
        wanted = [(g,) if isinstance(g, str) else g for g in dst_pattern]
        flat = [n for group in wanted for n in group]
        need(sorted(flat) == sorted(names), "view", "{} -> {} changes names", src_pattern, dst_pattern)
        view = view.permute([names.index(n) for n in flat])
        for dim, group in enumerate(wanted):
            view = view.flatten_dims(dim, dim + len(group) - 1) if len(group) > 1 else view
        return view

    def view(self, dtype: Any) -> "NkiTensor":
        """The same bytes as another dtype; the last dimension scales."""
        new = as_dtype(dtype)
        old, size = self.dtype.itemsize, new.itemsize
        counts = (self.shape[-1], *self.strides[:-1], self.offset)
        good = not self.is_indirect() and self.strides[-1] == 1 and all(n * old % size == 0 for n in counts)
        need(good, "view", "view({}): {} must be direct, end contiguous and align to {} bytes", new, self, size)
        last, *strides, offset = (n * old // size for n in counts)
        return self._with((*self.shape[:-1], last), (*strides, 1), offset, dtype=new)

    reinterpret_cast = view

    def ap(
        self,
        pattern: Any,
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> "NkiTensor":
        """An explicit access pattern over the storage: [[stride, count], ...] in elements of `dtype`. Refused on a view that
        does not start where its storage does: NKI's guide says its offset is ignored, the API page that it is kept."""
        whole = not self.offset and not self.is_indirect()
        need(whole, "ap-on-view", "NKI is of two minds on .ap() of a slice ({}); call it on the whole", self)
        new = as_dtype(dtype) if dtype is not None else self.dtype
        deep = "a pattern of {} dimensions ({}); a partition and {} more are the most"
        need(len(pattern) <= PATTERN_DIMENSIONS, "access-pattern", deep, len(pattern), pattern, PATTERN_DIMENSIONS - 1)
        shape, strides = [int(n) for _, n in pattern], [int(s) for s, _ in pattern]
        pitch = self.storage.pitch // new.itemsize
        good = shape and (not self.buffer.on_chip or shape[0] == 1 or strides[0] == pitch)
        need(good, "ap-partition-stride", "a pattern of {} starts with [{}, n]; got {}", self, pitch, pattern)
        need(scalar_offset is None or vector_offset is None, "ap", "scalar_offset and vector_offset exclude each other")
        source = vector_offset if vector_offset is not None else scalar_offset
        index = None
        if source is not None:
            rows = vector_offset is None or (indirect_dim == 0 and not self.buffer.on_chip)
            need(rows, "ap", "vector_offset takes dimension 0 in HBM; got {} of {}", indirect_dim, self)
            _need_one(0 if scalar_offset is None else scalar_offset)
            scale = self.strides[self._dim(indirect_dim)] * self.dtype.itemsize // new.itemsize
            index = Indirect("scalar" if vector_offset is None else "vector", source, scale, indirect_dim)
        view = NkiTensor(self.storage, shape, strides, int(offset or 0), new, index)
        inside = min(shape) >= 1 and min(strides) >= 0 and (index or view.holds(view.offset))
        need(
            inside, "out-of-bounds", "{} from {} on leaves {}, or a partition of it", pattern, offset or 0, self.storage
        )
        return view

    def indirect(self, *_: object, **__: object) -> NoReturn:
        """Tensor indirection exists from NeuronCore-v4 on."""
        raise NotImplementedError("target: .indirect() needs NeuronCore-v4 (Trn3); use .ap(vector_offset=)")


def _need_one(i: Any) -> None:
    """A run-time address for all elements is a register, or a tensor with one integer."""
    one = i.size == 1 and i.dtype in INTS if isinstance(i, NkiTensor) else isinstance(i, (int, VirtualRegister))
    need(one, "operand", "a run-time index is a register or a tensor of one integer; got {!r}", i)


def whole(storage: Storage) -> NkiTensor:
    """The view of everything."""
    return NkiTensor(storage, storage.shape, _row_major(storage.shape), 0, storage.dtype, None)


def _row_major(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def _fill(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """`shape` with its -1 replaced; refused unless it holds `size` elements."""
    new = [int(n) for n in shape]
    if new.count(-1) == 1:
        new[new.index(-1)] = size // max(1, -prod(new))
    need(new and prod(new) == size, "view", "shape {} does not hold {} elements", tuple(shape), size)
    return tuple(new)


def _reshape_strides(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of `new` over the same elements, or None when they do not exist: numpy's answer for bytes nobody touches."""
    bytes_ = np.lib.stride_tricks.as_strided(np.empty(1, np.int8), shape, strides)
    try:
        return bytes_.reshape(new, copy=False).strides
    except ValueError:
        return None
