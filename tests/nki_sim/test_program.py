"""The contract: a program comes from shapes, dtypes and compile-time arguments alone, its hash is its identity, and running it
is running the kernel."""

import subprocess
import sys
from pathlib import Path

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest
from nki_sim import Spec
from sim_harness import hbm, randn


def scaled(x, scale=2.0, passes=1):
    tile, out = nl.load(x), hbm(*x.shape, dtype=x.dtype)
    for _ in range(passes):
        nisa.tensor_scalar(tile, tile, nl.multiply, scale)
    nisa.dma_copy(out, tile)
    return out


def hash_of(shape=(8, 4), dtype="float32", kernel=scaled, **compile_time):
    return nki_sim.trace(kernel, (Spec(shape, dtype),), **compile_time).hash


def test_the_hash_depends_on_shapes_dtypes_and_compile_time_arguments():
    others = [hash_of((8, 5)), hash_of(dtype="bfloat16"), hash_of(scale=3.0), hash_of(passes=2)]
    assert len({hash_of(), *others}) == 5
    assert hash_of() == hash_of(scale=2.0) == nki_sim.trace(scaled, {"x": Spec((8, 4), np.dtype("float32"))}).hash
    assert nki_sim.trace(scaled, (randn(8, 4),)).hash == nki_sim.trace(scaled, (randn(8, 4, seed=1),)).hash
    two = nki_sim.jit(scaled)[2]
    assert nki_sim.trace(two, (Spec((8, 4), "float32"),)).hash != hash_of()


def test_the_hash_sees_constants_orders_addresses_and_dependencies():
    def kernel(x, what=""):
        constant = nl.shared_constant(np.full((8, 4), 1.0 if what != "constant" else 2.0, np.float32))
        tile = nl.ndarray((8, 4), "float32", address=(0, 0 if what != "address" else 64))
        first = nisa.dma_copy(tile, constant if what != "order" else x)
        second = nisa.dma_copy(tile, x if what != "order" else constant)
        if what == "dependency":
            second.depends_on(first)
        out = hbm(8, 4)
        nisa.dma_copy(out, tile)
        return out

    assert len({hash_of(kernel=kernel, what=w) for w in ("", "constant", "order", "address", "dependency")}) == 5


def test_a_loop_is_one_entry_however_often_it_runs():
    def kernel(x, n):
        tile, reg, out = nl.load(x), nisa.register_alloc(), hbm(*x.shape)
        nisa.register_load(reg, nl.load(n))
        nl.fori_loop(0, reg, lambda i: nisa.tensor_scalar(tile, tile, nl.add, 1.0) and None)
        nisa.dma_copy(out, tile)
        return out

    x = np.zeros((8, 4), np.float32)
    counts = [np.array([[n]], np.int32) for n in (1, 3, 70)]
    programs = [nki_sim.trace(kernel, (x, n)) for n in counts]
    assert len({p.hash for p in programs}) == 1
    ops = [i.op for i in programs[0].instructions]
    assert ops.count("tensor_scalar") == 1 and "for r" in programs[0].text()
    for n in counts:
        got, direct = programs[0].run(x, n).outputs, nki_sim.simulate(kernel)(x, n)
        assert (got == n[0, 0]).all() and got.tobytes() == direct.tobytes()


def test_a_program_refuses_arguments_it_was_not_specialised_for():
    program = nki_sim.trace(scaled, (Spec((8, 4), "float32"),))
    x = randn(8, 4)
    np.testing.assert_array_equal(program.run(x).outputs, 2 * x)
    for wrong in (randn(8, 5), x.astype(np.float16)):
        with pytest.raises(ValueError, match="Trace again"):
            program.run(wrong)
    with pytest.raises(ValueError, match="Trace again"):
        program.run(x, scale=3.0)


def test_values_cannot_be_read_while_tracing():
    def kernel(x):
        if float(x[0, 0]) > 0:
            return x

    with pytest.raises(TypeError):
        nki_sim.trace(kernel, (randn(8, 4),))


def test_kernels_take_what_nkis_front_ends_take():
    def only(x, *, flag=1):
        return x

    with pytest.raises(nki_sim.NkiError, match=r"signature.*keyword-only"):
        nki_sim.trace(only, (randn(8, 4),))
    with pytest.raises(nki_sim.NkiError, match=r"signature.*tuples"):
        nki_sim.trace(lambda xs: xs[0], ([randn(8, 4)],))


def test_a_kernel_called_by_a_kernel_is_part_of_it():
    inner = nki_sim.jit(scaled)

    @nki_sim.jit
    def outer(x):
        return inner(x), inner[1](x, scale=3.0)

    x = randn(8, 4)
    two, three = outer(x)
    assert (two == 2 * x).all() and (three == np.float32(3) * x).all()


def test_another_target_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    with pytest.raises(NotImplementedError, match="trn3"):
        nki_sim.trace(scaled, (Spec((8, 4), "float32"),))


def everything(x, n):
    """Operators, enumerations, constants, registers, loops: whatever a program's text can hold."""
    tile, out, mask = nl.load(x), hbm(*x.shape), nl.ndarray(x.shape, "uint8")
    nisa.activation(tile, nl.silu, tile, reduce_cmd=nisa.reduce_cmd.reset_reduce)
    nisa.tensor_scalar(tile, tile, nl.multiply, np.float32(2.0), op1=nl.add, operand1=1.0)
    nisa.tensor_scalar(mask, tile, nl.greater, 0.0)
    nisa.affine_select(tile, [[1, 4]], 1, tile, 0.0, cmp_op=nl.less)
    register = nisa.register_alloc()
    nisa.register_load(register, nl.load(n))
    nl.fori_loop(0, register, lambda i: nisa.tensor_copy(tile, tile, engine=nisa.engine.gpsimd) and None)
    nisa.dma_copy(out, tile, dge_mode=nisa.dge_mode.hwdge)
    nisa.dma_copy(out, nl.shared_constant(np.ones(x.shape, np.float32)))
    return out


HASH = """
import sys
sys.path[:0] = [{tests!r}]
{imports}
import nki_sim
import test_program
print(nki_sim.trace(test_program.everything, (nki_sim.Spec((8, 4), "float32"), nki_sim.Spec((1, 1), "int32"))).hash)
"""


def test_the_hash_is_the_same_in_every_process_and_order_of_imports():
    tests = str(Path(__file__).parent)
    orders = (
        "import nki_sim.language",
        "import collections, json\nx = [object() for _ in range(10000)]\nimport nki_sim.cost",
    )
    outputs = {
        subprocess.run([sys.executable, "-c", HASH.format(tests=tests, imports=i)], check=True, capture_output=True, text=True).stdout
        for i in orders
    }  # fmt: skip
    here = nki_sim.trace(everything, (Spec((8, 4), "float32"), Spec((1, 1), "int32")))
    assert outputs == {here.hash + "\n"} and " at 0x" not in here.text()


def test_an_argument_without_a_stable_text_is_refused_where_the_hash_is_asked_for():
    program = nki_sim.trace(
        lambda x: nisa.iota(nl.ndarray((8, 4), "int32"), [[1, 4]]) and x, (Spec((8, 4), "float32"),)
    )
    program.instructions[0].args["offset"] = object()
    with pytest.raises(TypeError, match="identity needs numbers"):
        program.hash  # noqa: B018


def test_a_forgotten_return_is_found():
    def kernel(x):
        nisa.dma_copy(hbm(*x.shape), nl.load(x))

    with pytest.raises(nki_sim.NkiError, match=r"no-output: .*`return` the tensor.*test_program\.py"):
        nki_sim.trace(kernel, (Spec((8, 4), "float32"),))

    def updates(x):
        nisa.dma_copy(x, nl.load(x))

    nki_sim.trace(updates, (Spec((8, 4), "float32"),))


def test_a_platform_is_chosen_by_the_environment_only():
    with pytest.raises(nki_sim.NkiError, match=r"platform-target.*NEURON_PLATFORM_TARGET_OVERRIDE"):
        nki_sim.jit(platform_target="trn2")(scaled)
    with pytest.raises(nki_sim.NkiError, match="platform-target"):
        nki_sim.jit(scaled, platform_target="trn3")
