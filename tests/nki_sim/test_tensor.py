"""The contract: a view addresses what numpy's view of the same name addresses, and what a view cannot express is refused."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nki_sim.dtypes import DType
from nki_sim.tensor import MemoryRegion, Storage, whole
from sim_harness import hbm, randn, refused, sb


def tensor(*shape, dtype="float32", buffer=MemoryRegion.private_hbm):
    return whole(Storage((0, 0), shape, DType(dtype), buffer, "", None))


def pick(view, base):
    """The elements of `base` (an array of the storage) that a view addresses."""
    size = base.itemsize
    return np.ndarray(view.shape, base.dtype, base, view.offset * size, tuple(s * size for s in view.strides))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_chains_of_views_address_what_numpy_addresses(data):
    base = np.arange(2 * 3 * 4 * 6, dtype=np.float32).reshape(2, 3, 4, 6)
    view, want = tensor(2, 3, 4, 6), base
    for _ in range(data.draw(st.integers(1, 4))):
        dim = data.draw(st.integers(0, view.ndim - 1))
        n = view.shape[dim]
        kind = data.draw(st.sampled_from(["slice", "select", "permute", "expand", "split", "reshape"]))
        if kind == "slice":
            start = data.draw(st.integers(0, n - 1))
            stop, step = data.draw(st.integers(start + 1, n)), data.draw(st.integers(1, 3))
            key = (slice(None),) * dim + (slice(start, stop, step),)
            view, want = view[key], want[key]
        elif kind == "select" and view.ndim > 1:
            i = data.draw(st.integers(-n, n - 1))
            view, want = view[(..., i) + (slice(None),) * (view.ndim - dim - 1)], want.take(i, axis=dim)
        elif kind == "permute":
            order = data.draw(st.permutations(range(view.ndim)))
            view, want = view.permute(order), want.transpose(order)
        elif kind == "expand":
            view, want = view.expand_dim(dim).broadcast(dim, 2), np.repeat(np.expand_dims(want, dim), 2, axis=dim)
        elif kind == "split" and n % 2 == 0:
            view, want = view.reshape_dim(dim, (2, -1)), want.reshape(*want.shape[:dim], 2, -1, *want.shape[dim + 1 :])
        elif kind == "reshape" and view.is_contiguous():
            view, want = view.reshape(want.size // n, n), want.reshape(want.size // n, n)
    np.testing.assert_array_equal(pick(view, base), want)


def test_rearrange_flatten_squeeze_and_reinterpretation():
    base = np.arange(4 * 24, dtype=np.float32).reshape(4, 24)
    view = tensor(4, 24).rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4})
    np.testing.assert_array_equal(pick(view, base), base.reshape(4, 4, 6).transpose(0, 2, 1))
    merged = tensor(4, 24).rearrange(("b", ("h", "w")), (("b", "h"), "w"), {"w": 6})
    np.testing.assert_array_equal(pick(merged, base), base.reshape(16, 6))
    assert tensor(4, 1, 24).squeeze_dim(1).flatten_dims(0, 1).shape == (96,)
    small = tensor(4, 24)[1:3].view("bfloat16")
    assert (small.shape, small.strides, small.offset) == ((2, 48), (48, 1), 48)
    assert small.view(nl.float32).shape == (2, 24)


def test_on_chip_indexing_keeps_the_partition_and_two_dimensions():
    tile = tensor(8, 4, 6, buffer=MemoryRegion.sbuf)
    assert tile[3].shape == (1, 4, 6) and tile[3].partition == 3
    assert tile[:, 2].shape == (8, 6) and tile[0:4, 1, 2].shape == (4, 1)
    assert tensor(8, 4)[3].shape == (4,) and tensor(8)[3].shape == (1,)


def test_a_reinterpreted_view_reads_the_same_bytes():
    def kernel(x):
        tile, out = nl.load(x), hbm(4, 12, dtype="uint8")
        nisa.dma_copy(out, tile.ap([[12, 4], [1, 12]], dtype="uint8"))
        return out

    x = randn(4, 3)
    np.testing.assert_array_equal(nki_sim.simulate(kernel)(x), x.view(np.uint8))


BAD = [
    lambda: sb(8, 4)[:, 2:5],
    lambda: sb(8, 4)[:, 2:2],
    lambda: sb(8, 4)[8],
    lambda: sb(8, 4)[0, 0, 0],
    lambda: sb(8, 4).permute((1, 0)),
    lambda: hbm(8, 4).permute((0, 0)),
    lambda: sb(8, 4).broadcast(1, 3),
    lambda: sb(1, 4).broadcast(0, 3),
    lambda: sb(8, 4).reshape(4, 8),
    lambda: hbm(8, 4).reshape(5, 7),
    lambda: hbm(8, 4).permute((1, 0)).reshape(32),
    lambda: sb(8, 4).reshape_dim(0, (2, 4)),
    lambda: sb(8, 4).squeeze_dim(1),
    lambda: sb(8, 4).expand_dim(3),
    lambda: sb(8, 4).expand_dim(0),
    lambda: hbm(8, 4, 2).flatten_dims(1, 3),
    lambda: hbm(8, 4).slice(2, 0, 1),
    lambda: sb(8, 3).view("uint64"),
    lambda: sb(8, 3, dtype="bfloat16").view("float32"),
    lambda: sb(8, 4)[:, 1:3].ap([[4, 8], [1, 2]]),
    lambda: sb(8, 4).ap([[1, 8], [1, 2]]),
    lambda: sb(8, 4).ap([[4, 8], [1, 4]], vector_offset=sb(8, 1, dtype="int32")),
    lambda: hbm(8, 4).vector_select(1, sb(8, 1, dtype="int32")),
    lambda: hbm(8, 4).vector_select(0, sb(8, 1, dtype="int32"))[0:4],
    lambda: hbm(8, 4)[nl.ds(nisa.register_alloc(0), 2)][:, nl.ds(nisa.register_alloc(0), 2)],
    lambda: hbm(8, 4).rearrange(("a", "b"), ("a", "c")),
    lambda: nl.ndarray((0, 4), "float32"),
    lambda: nl.ndarray((4,), "float32"),
    lambda: nl.ndarray((4, 4), "complex64"),
    lambda: nl.ndarray((4, 4), "float32", buffer=nl.hbm, address=(0, 0)),
]


@pytest.mark.parametrize("body", BAD)
def test_a_view_that_cannot_be_expressed_is_refused(body):
    refused("", body, error=ValueError)


def test_assignment_and_foreign_buffers_are_refused():
    def assign():
        sb(8, 4)[0:4] = 1.0

    refused("", assign, error=TypeError)
    refused("", lambda: nl.ndarray((4, 4), "float32", buffer="sbuf"), error=TypeError)
    refused("", lambda: nl.ndarray((4, 4), "float4_e2m1fn_x4"), error=NotImplementedError)
    with pytest.raises(RuntimeError, match="no kernel is running"):
        nl.zeros((4, 4), "float32")
