"""The contract: capacity, overlapping addresses and memory that nothing wrote are found, with the line that reads it."""

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from sim_harness import hbm, ps, refused, sb

KIB = 1024


def usage(body):
    def kernel():
        body()

    return nki_sim.trace(kernel).usage


def test_high_water_is_what_lives_at_once():
    def body():
        kept = sb(128, 10 * KIB)
        for _ in range(4):
            scratch = sb(128, 5 * KIB)
            nisa.tensor_copy(scratch, kept[:, 0 : 5 * KIB])
        nisa.tensor_copy(ps(128, 512), kept[:, 0:512])

    assert usage(body) == (4 * 15 * KIB, 2048)


def test_a_loop_needs_its_own_tensors_beside_those_from_outside():
    def body():
        kept = sb(128, 1000)
        nl.fori_loop(0, 3, lambda i: nisa.tensor_copy(sb(128, 1000), kept) and None)

    assert usage(body).sbuf == 8000


def test_more_than_sbuf_or_psum_is_refused_with_the_biggest_tensors():
    def sbuf():
        tiles = [sb(128, 20 * KIB) for _ in range(3)]
        nisa.tensor_tensor(tiles[0], tiles[1], tiles[2], nl.add)

    message = refused("capacity", sbuf)
    assert "245760" in message and "212464" in message and "81920 B sbuf" in message

    def psum():
        tiles = [ps(128, 512) for _ in range(9)]
        for t in tiles + tiles:
            nisa.memset(t, 0)

    refused("capacity", psum)
    refused("capacity", lambda: ps(128, 4097))


def test_tensors_of_few_partitions_may_stand_side_by_side():
    def body(n, count):
        tiles = [sb(n, 40 * KIB) for _ in range(count)]  # 160 KiB per partition each
        for t in tiles:
            nisa.memset(t, 0)

    assert usage(lambda: body(64, 2)).sbuf == usage(lambda: body(32, 4)).sbuf == 160 * KIB
    refused("capacity", lambda: body(65, 2))


def place(byte, part=0, size=64, n=8):
    return nl.ndarray((n, size), "float32", address=(part, byte))


def test_a_read_after_an_overlapping_write_is_refused_and_names_both():
    def body():
        first, second = place(0), place(128)
        nisa.memset(first, 1)
        nisa.memset(second, 2)
        nisa.tensor_copy(sb(8, 64), first)

    message = refused("overlap", body)
    assert "first at (0, 32)" in message and "256 of 512" in message


def test_addresses_may_be_reused_once_the_earlier_tensor_is_done_and_apart_by_partition():
    def body():
        first = place(0)
        nisa.memset(first, 1)
        nisa.tensor_copy(sb(8, 64), first)
        second = place(0)
        nisa.memset(second, 2)
        other = place(0, part=32)
        nisa.memset(other, 3)
        nisa.tensor_copy(sb(8, 64), second)

    usage(body)
    nki_sim.simulate(lambda: body())()


@pytest.mark.parametrize(("part", "byte"), [(121, 0), (0, 224 * KIB - 255), (-1, 0)])
def test_an_address_outside_is_refused(part, byte):
    refused("address", lambda: place(byte, part))


def test_reading_what_nothing_wrote_names_the_line_the_tensor_and_the_first_element():
    def body():
        tile = nl.ndarray((8, 4), "float32", name="half")
        nisa.memset(tile[:, 0:2], 0)
        nisa.tensor_copy(sb(8, 4), tile)  # the line at fault

    message = refused("uninitialized", body)
    assert "'half'" in message and "16 of 32" in message and "(0, 2)" in message and "in body]" in message


def test_psum_hbm_and_private_memory_are_watched_too():
    refused("uninitialized", lambda: nisa.tensor_copy(sb(8, 4), ps(8, 4)))
    refused("uninitialized", lambda: nisa.dma_copy(sb(8, 4), hbm(8, 4)))
    refused("uninitialized", lambda: nisa.dma_copy(sb(8, 4), nl.ndarray((8, 4), "float32", buffer=nl.private_hbm)))


def test_outputs_must_be_written_everywhere_and_live_in_shared_hbm():
    def kernel(buffer):
        out = nl.ndarray((8, 4), "float32", buffer=buffer)
        nisa.dma_copy(out[0:7], sb(7, 4))
        return out

    with pytest.raises(nki_sim.NkiError, match=r"unwritten-output: 4 of 32 elements.*test_memory"):
        nki_sim.simulate(kernel)(nl.shared_hbm)
    with pytest.raises(nki_sim.NkiError, match="output: the kernel returns private_hbm"):
        nki_sim.simulate(kernel)(nl.private_hbm)


def test_recorded_rules_leave_nan_and_a_finding_where_they_would_have_stopped():
    def kernel():
        out = hbm(2, 4)
        nisa.dma_copy(out[0:1], nl.ndarray((1, 4), "float32"))
        return out

    with nki_sim.checks(record=["uninitialized", "unwritten-output"]) as findings:
        got = nki_sim.simulate(kernel)()
    assert np.isnan(got).all() and [f.rule for f in findings] == ["uninitialized", "unwritten-output"]
    assert findings[0].where.function == "kernel"
    with pytest.raises(nki_sim.NkiError):
        nki_sim.simulate(kernel)()


def test_a_psum_address_is_a_multiple_of_four_bytes():
    refused("alignment", lambda: nl.ndarray((8, 4), "bfloat16", buffer=nl.psum, address=(0, 2)))
    nki_sim.trace(lambda: nl.ndarray((8, 4), "bfloat16", buffer=nl.psum, address=(0, 4)) is None or None)
