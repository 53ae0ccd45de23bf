"""Tensors and views: a storage somewhere on the device, and strided access patterns over it. No data lives here.

A view is `offset + sum(index * stride)` in elements of its dtype, over a storage laid out row by row; on chip the first
dimension is the partition and its stride the storage's elements per partition. An indirect view adds an address known
only at run time: one for all (`scalar_offset`) or one a partition (`vector_offset`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from nki_sim.dtypes import NUMPY, DType, as_dtype
from nki_sim.errors import Where

__all__ = ["DynamicSlice", "Indirect", "MemoryRegion", "NkiTensor", "Storage", "VirtualRegister"]


class MemoryRegion(Enum):
    """Where a tensor lives. `hbm` is the private one."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def on_chip(self) -> bool:
        return self in (MemoryRegion.sbuf, MemoryRegion.psum)


@dataclass(eq=False)
class Storage:
    """One allocation. `key` is (core or "shared", number) and names it in every run; `first`/`last` are the positions
    of its first and last use in the block of instructions that allocated it."""

    key: tuple[int | str, int]
    shape: tuple[int, ...]
    dtype: DType
    buffer: MemoryRegion
    name: str
    where: Where | None
    address: tuple[int, int] | None = None
    constant: np.ndarray | None = None
    first: int | None = None
    last: int | None = None
    unit: int = 0  # bytes of the smallest element any view uses: the grain at which writes are remembered
    aliases: "list[Storage]" = field(default_factory=list)  # explicitly placed storages that share bytes with this one

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def pitch(self) -> int:
        """Bytes of a partition on chip, of a row (last dimension) in HBM."""
        row = self.shape[1:] if self.buffer.on_chip else self.shape[-1:]
        return prod(row) * self.dtype.itemsize

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"{self.buffer.value} tensor{name} {self.shape} {self.dtype} (allocated at {self.where})"


class VirtualRegister:
    """A number the device knows and Python does not."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _no(self, *_: object) -> Any:
        raise TypeError(
            "device-value: a register's value is not known while the kernel is traced; Python cannot branch on it, convert it "
            "or compute with it (0.7 alone traces arithmetic). Use nl.fori_loop/nl.while_loop, pass it as a scalar_offset, or "
            "compute in SBUF and register_load the result"
        )

    __bool__ = __int__ = __index__ = __float__ = __iter__ = __len__ = _no
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _no
    __lt__ = __le__ = __gt__ = __ge__ = _no

    def __repr__(self) -> str:
        return f"<register {self.number}>"


@dataclass(frozen=True)
class DynamicSlice:
    """nl.ds(start, size): `size` elements from `start`, which may be a register."""

    start: "int | VirtualRegister"
    size: int


@dataclass(frozen=True, eq=False)
class Indirect:
    """The run-time part of an address: `scale` elements times the value(s) found in `source`."""

    kind: str  # "scalar" or "vector"
    source: "VirtualRegister | NkiTensor"
    scale: int
    dim: int


class NkiTensor:
    """A view of a storage. Methods return new views; nothing is copied."""

    __slots__ = ("dtype", "indirect_index", "offset", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int = 0,
        dtype: DType | None = None,
        indirect_index: Indirect | None = None,
    ) -> None:
        self.storage = storage
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        self.offset = offset
        self.dtype = dtype or storage.dtype
        self.indirect_index = indirect_index

    # -- what it is ---------------------------------------------------------------------------------------------------
    @property
    def buffer(self) -> MemoryRegion:
        return self.storage.buffer

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def free_size(self) -> int:
        """Elements per partition."""
        return prod(self.shape[1:])

    @property
    def partition(self) -> int:
        """The first partition of an on-chip view."""
        start = self.storage.address[0] if self.storage.address else 0
        return start + self.offset * self.dtype.itemsize // self.storage.pitch

    def is_contiguous(self) -> bool:
        """Whether elements follow each other in memory (on chip: within each partition)."""
        skip = 1 if self.buffer.on_chip else 0
        return all(
            n == 1 or s == e
            for n, s, e in zip(self.shape[skip:], self.strides[skip:], _row_major(self.shape)[skip:], strict=True)
        )

    def is_indirect(self) -> bool:
        """Whether part of the address is known only at run time."""
        return self.indirect_index is not None

    def get_pattern(self) -> list[list[int]]:
        """[[stride, count], ...] in elements."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def __repr__(self) -> str:
        return f"{self.buffer.value}{list(self.shape)} {self.dtype}"

    def __bool__(self) -> bool:
        raise TypeError(
            "device-value: a tensor's values are not known while the kernel is traced; Python cannot branch on them"
        )

    def __iter__(self) -> Iterator["NkiTensor"]:
        raise TypeError("device-value: a tensor cannot be iterated over; loop over range(tensor.shape[0]) and slice")

    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError(
            "assignment into a tensor is not an instruction; use nisa.dma_copy or nisa.tensor_copy with this slice as dst"
        )

    # -- views --------------------------------------------------------------------------------------------------------
    def _with(self, shape: Sequence[int], strides: Sequence[int], offset: int, **changes: Any) -> "NkiTensor":
        index = changes.get("indirect_index", self.indirect_index)
        return NkiTensor(self.storage, shape, strides, offset, changes.get("dtype", self.dtype), index)

    def _pins(self, dim: int, what: str, keep: bool = False) -> int:
        """A valid dimension; refused when the operation may not touch it (`keep`: the partition dimension as well)."""
        if not -self.ndim <= dim < self.ndim:
            raise ValueError(f"{what}: dimension {dim} does not exist in {self}")
        dim %= self.ndim
        if self.indirect_index is not None and self.indirect_index.kind == "vector" and dim == 0:
            raise ValueError(f"{what}: dimension 0 of {self} is indirect and cannot be sliced, selected or moved")
        if keep and dim == 0 and self.buffer.on_chip:
            raise ValueError(
                f"{what}: dimension 0 of on-chip {self} is the partition and cannot be changed; choose a free dimension"
            )
        return dim

    def __getitem__(self, key: Any) -> "NkiTensor":
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        if len(keys) > self.ndim:
            raise ValueError(f"{len(keys)} indices for {self} with {self.ndim} dimensions")
        view, dim = self, 0
        for k in keys:
            if isinstance(k, slice):
                start, stop, step = (None if v is None else int(v) for v in (k.start, k.stop, k.step))
                n = view.shape[dim]
                start, stop = (v + n if v is not None and v < 0 else v for v in (start, stop))
                if (start, stop, step) != (None, None, None):
                    view = view.slice(dim, start or 0, n if stop is None else stop, step or 1)
                dim += 1
            elif isinstance(k, DynamicSlice):
                view = (
                    view._dynamic(dim, k.start, k.size)
                    if isinstance(k.start, VirtualRegister)
                    else view.slice(dim, k.start, k.start + k.size)
                )
                dim += 1
            elif isinstance(k, VirtualRegister):
                view = view._dynamic(dim, k, 1)
                view, dim = view._drop(dim)
            else:
                i = int(k)
                i = i + view.shape[dim] if i < 0 else i
                view, dim = view.slice(dim, i, i + 1)._drop(dim)
        return view

    def _drop(self, dim: int) -> "tuple[NkiTensor, int]":
        """Without a dimension of size 1, and the next dimension to index; what must stay stays."""
        if (self.buffer.on_chip and (dim == 0 or self.ndim == 2)) or self.ndim == 1:
            return self, dim + 1
        return self._with(
            self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :], self.offset
        ), dim

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        """Elements start, start + step, ... below end, along one dimension."""
        dim = self._pins(dim, "slice")
        if not (0 <= start < end <= self.shape[dim] and step >= 1):
            raise ValueError(
                f"out-of-bounds: slice [{start}:{end}:{step}] of dimension {dim} of {self}; bounds must satisfy 0 <= start < end <= {self.shape[dim]}"
            )
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = -(-(end - start) // step), strides[dim] * step
        return self._with(shape, strides, self.offset + start * self.strides[dim])

    def select(self, dim: int, index: "int | NkiTensor | VirtualRegister") -> "NkiTensor":
        """One element along a dimension, which disappears; the index may be on the device."""
        dim = self._pins(dim, "select", keep=not isinstance(index, int))
        view = self.slice(dim, index, index + 1) if isinstance(index, int) else self._dynamic(dim, index, 1)
        return view._drop(dim)[0]

    def _dynamic(self, dim: int, start: "VirtualRegister | NkiTensor", size: int) -> "NkiTensor":
        if self.indirect_index is not None:
            raise ValueError(f"{self} is already indirect; only one run-time address per view")
        shape = list(self.shape)
        shape[dim] = size
        return self._with(
            shape, self.strides, self.offset, indirect_index=Indirect("scalar", start, self.strides[dim], dim)
        )

    def vector_select(self, dim: int, vector_offset: "NkiTensor") -> "NkiTensor":
        """Row index[p] of dimension 0 for each partition p."""
        if dim != 0 or self.buffer.on_chip or self.indirect_index is not None:
            raise ValueError(f"vector_select needs dim 0 of a direct HBM tensor; got dim {dim} of {self}")
        index = Indirect("vector", vector_offset, self.strides[0], 0)
        return self._with((vector_offset.shape[0], *self.shape[1:]), self.strides, self.offset, indirect_index=index)

    def permute(self, dims: Sequence[int]) -> "NkiTensor":
        """Dimensions in another order; on chip the partition stays first."""
        if sorted(dims) != list(range(self.ndim)):
            raise ValueError(f"permute{tuple(dims)} is not a permutation of {self.ndim} dimensions")
        if dims[0] != 0:
            self._pins(0, "permute", keep=True)
        return self._with([self.shape[d] for d in dims], [self.strides[d] for d in dims], self.offset)

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        """Repeat a dimension of size 1."""
        dim = self._pins(dim, "broadcast", keep=True)
        if self.shape[dim] != 1:
            raise ValueError(f"broadcast: dimension {dim} of {self} has size {self.shape[dim]}, not 1")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._with(shape, strides, self.offset)

    def expand_dim(self, dim: int) -> "NkiTensor":
        """A new dimension of size 1."""
        if dim == 0 and (self.buffer.on_chip or self.is_indirect()):
            self._pins(0, "expand_dim", keep=True)
        return self._with(
            (*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], 0, *self.strides[dim:]), self.offset
        )

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        """Without a dimension of size 1."""
        dim = self._pins(dim, "squeeze_dim", keep=True)
        if self.shape[dim] != 1:
            raise ValueError(f"squeeze_dim: dimension {dim} of {self} has size {self.shape[dim]}, not 1")
        return self._with(
            self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :], self.offset
        )

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> "NkiTensor":
        """One dimension split into several; one of them may be -1."""
        dim = self._pins(dim, "reshape_dim")
        new = _fill(shape, self.shape[dim])
        if len(new) > 1:
            self._pins(dim, "reshape_dim", keep=True)
        strides = [self.strides[dim] * s for s in _row_major(new)]
        return self._with(
            (*self.shape[:dim], *new, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *strides, *self.strides[dim + 1 :]),
            self.offset,
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        """Dimensions start..end (inclusive) as one."""
        end = end_dim % self.ndim
        return self.reshape((*self.shape[:start_dim], prod(self.shape[start_dim : end + 1]), *self.shape[end + 1 :]))

    def reshape(self, *shape: Any) -> "NkiTensor":
        """The same elements in the same order under another shape; refused when that would need a copy."""
        new = _fill(shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape, self.size)
        if new[0] != self.shape[0]:
            self._pins(0, f"reshape{new}", keep=True)
        strides = _reshape_strides(self.shape, self.strides, new)
        if strides is None:
            raise ValueError(
                f"reshape{new}: {self} with strides {self.strides} is not laid out so; copy it into a new tensor first"
            )
        return self._with(new, strides, self.offset)

    def rearrange(
        self, src_pattern: tuple, dst_pattern: tuple, fixed_sizes: dict[str, int] | None = None
    ) -> "NkiTensor":
        """Split, reorder and merge dimensions by name, as in einops: (("b", ("h", "w")), ("b", "w", "h"), {"h": 4})."""
        sizes, names, view = dict(fixed_sizes or {}), [], self
        for group in src_pattern:
            group = (group,) if isinstance(group, str) else group
            view = view.reshape_dim(
                len(names), [sizes.get(g, -1 if len(group) > 1 else view.shape[len(names)]) for g in group]
            )
            names.extend(group)
        flat = [n for group in dst_pattern for n in ((group,) if isinstance(group, str) else group)]
        if sorted(flat) != sorted(names):
            raise ValueError(f"rearrange: {src_pattern} and {dst_pattern} must name the same dimensions")
        view, dim = view.permute([names.index(n) for n in flat]), 0
        for group in dst_pattern:
            if not isinstance(group, str):
                view = view.flatten_dims(dim, dim + len(group) - 1)
            dim += 1
        return view

    def view(self, dtype: object) -> "NkiTensor":
        """The same bytes as another dtype; the last dimension scales."""
        new = as_dtype(dtype)
        old, size = self.dtype.itemsize, new.itemsize
        if self.is_indirect() or self.strides[-1] != 1 or self.shape[-1] * old % size:
            raise ValueError(
                f"view({new}): the last dimension of {self} must be direct, contiguous and hold a whole number of {new} elements"
            )

        def scaled(n: int) -> int:
            if n * old % size:
                raise ValueError(
                    f"view({new}): {self} is not aligned to {size} bytes (offset {self.offset}, strides {self.strides})"
                )
            return n * old // size

        return self._with(
            (*self.shape[:-1], scaled(self.shape[-1])),
            (*map(scaled, self.strides[:-1]), 1),
            scaled(self.offset),
            dtype=new,
        )

    reinterpret_cast = view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: "VirtualRegister | NkiTensor | None" = None,
        vector_offset: "NkiTensor | None" = None,
        indirect_dim: int = 0,
        dtype: object = None,
    ) -> "NkiTensor":
        """An explicit access pattern over the storage: [[stride, count], ...] in elements of `dtype`.

        Refused on a view that does not start at its storage's beginning: the guide says its offset is ignored, the API
        page that it is kept.
        """
        if self.offset or self.is_indirect():
            raise ValueError(
                "ap-on-view: .ap() of a sliced or indirect view means different things in NKI's guide and API page; call it on the whole tensor"
            )
        new = as_dtype(dtype) if dtype is not None else self.dtype
        shape, strides = [int(n) for _, n in pattern], [int(s) for s, _ in pattern]
        pitch = self.storage.pitch // new.itemsize
        if self.buffer.on_chip and shape[0] > 1 and strides[0] != pitch:
            raise ValueError(
                f"ap-partition-stride: an on-chip pattern starts with [elements per partition, partitions]; found stride {strides[0]}, expected {pitch} for {self}"
            )
        index = None
        if scalar_offset is not None and vector_offset is not None:
            raise ValueError("ap: scalar_offset and vector_offset exclude each other")
        source = vector_offset if vector_offset is not None else scalar_offset
        if source is not None:
            scale = self.strides[indirect_dim] * self.dtype.itemsize // new.itemsize
            kind = "scalar" if vector_offset is None else "vector"
            if kind == "vector" and (indirect_dim != 0 or self.buffer.on_chip):
                raise ValueError(
                    f"ap: vector_offset indexes dimension 0 of an HBM tensor; got indirect_dim={indirect_dim} of {self}"
                )
            index = Indirect(kind, source, scale, indirect_dim)
        view = NkiTensor(self.storage, shape, strides, int(offset or 0), new, index)
        if index is None:
            view.check_inside()
        return view

    def check_inside(self) -> None:
        """Refuse a pattern that leaves its storage."""
        last = self.offset + sum(s * (n - 1) for s, n in zip(self.strides, self.shape, strict=True))
        limit = self.storage.nbytes // self.dtype.itemsize
        if not (0 <= self.offset and last < limit) or min(self.shape) < 1 or min(self.strides) < 0:
            raise ValueError(
                f"out-of-bounds: pattern {self.get_pattern()} at offset {self.offset} reaches element {last} of {limit} in {self.storage}"
            )

    def indirect(self, *_: object, **__: object) -> "NkiTensor":
        """Tensor indirection exists from NeuronCore-v4 on."""
        raise NotImplementedError(
            "target: .indirect() needs NeuronCore-v4 (Trn3); the target is trn2. Use .ap(vector_offset=) with dma_copy"
        )

    # -- for the machine ----------------------------------------------------------------------------------------------
    @property
    def byte_strides(self) -> tuple[int, ...]:
        size = NUMPY[self.dtype].itemsize
        return tuple(s * size for s in self.strides)


def _row_major(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def whole(storage: Storage) -> NkiTensor:
    """The view of everything."""
    return NkiTensor(storage, storage.shape, _row_major(storage.shape))


def _fill(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """`shape` with its -1 replaced; refused unless it holds `size` elements."""
    new = [int(n) for n in shape]
    if new.count(-1) == 1:
        new[new.index(-1)] = size // max(1, -prod(new))
    if not new or prod(new) != size:
        raise ValueError(f"shape {tuple(shape)} does not hold {size} elements")
    return tuple(new)


def _reshape_strides(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> list[int] | None:
    """Strides of `new` over the same elements, or None when they do not exist (the algorithm of numpy's no-copy reshape)."""
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    result, i, j = [0] * len(new), 0, 0
    while j < len(new):
        if new[j] == 1:
            result[j] = result[j - 1] if j else 1
            j += 1
            continue
        n_old, first = old[i][0], i
        n_new, start = new[j], j
        while n_old != n_new:
            if n_new < n_old:
                j += 1
                n_new *= new[j]
            else:
                i += 1
                n_old *= old[i][0]
        if any(old[k][1] != old[k + 1][0] * old[k + 1][1] for k in range(first, i)):
            return None
        step = old[i][1]
        for k in range(j, start - 1, -1):
            result[k] = step
            step *= new[k]
        i, j = i + 1, j + 1
    return result
