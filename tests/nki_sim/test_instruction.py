"""The contract: what NKI 0.6's pages (aws-neuron-sdk 81ce03a, nki.isa) allow each operand of each instruction, and nothing else: where
it lives, its dtypes, its shape beside the others', and the engines. One case for each refusal, from a call that is valid but for it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import pytest
from nki_sim.instruction import INSTRUCTIONS
from sim_harness import refused

FLOATS = "float32 bfloat16 float16 float8_e4m3 float8_e5m2 float8_e4m3fn"
SMALL = "uint8 int8 uint16 int16"
INTS = f"{SMALL} int32 uint32"
MATMUL = "float32 bfloat16 float16 float8_e4m3 float8_e5m2"


class T(NamedTuple):
    """An operand: shape and dtype in the valid call; where it may be, the first by default; its dtypes (empty: any)."""

    shape: tuple[int, ...] = (8, 8)
    dtype: str = "float32"
    where: str = "sbuf psum"
    dtypes: str = ""


COLUMN = T((8, 1), dtypes="float32")
ANY_COLUMN = T((8, 1))
IN_SBUF = T(where="sbuf")
IN_HBM = T(where="sbuf hbm")
REGISTER, SCALAR, OTHER_CORE = object(), object(), object()
ENGINES = "tensor vector scalar gpsimd dma sync"


class Call(NamedTuple):
    """A valid call's arguments; which operands agree in size, in dtype, and are not both in PSUM; and who may run it."""

    arguments: dict[str, Any]
    same: str
    same_dtype: str
    one_psum: str
    engines: str


def call(*plain: str, same: str = "", same_dtype: str = "", one_psum: str = "", engines: str = "", **arguments: Any) -> Call:  # fmt: skip
    return Call({**dict.fromkeys(plain, T()), **arguments}, same, same_dtype, one_psum, engines)


def index8(**more: T) -> dict[str, T]:
    return {"data": T((8, 16)), "vals": T((8, 8)), **more}


CALLS = {
    "dma_copy": call(dst=IN_HBM, src=IN_HBM),
    "dma_compute": call(dst=IN_HBM, srcs=IN_HBM, reduce_op=nl.add),
    "dma_transpose": call(dst=IN_SBUF, src=IN_HBM, same_dtype="dst src"),
    "nc_matmul": call(dst=T(where="psum", dtypes="float32"), stationary=T(where="sbuf", dtypes=MATMUL), moving=T(where="sbuf", dtypes=MATMUL), accumulate=False),
    "nc_transpose": call("dst", "data", same_dtype="dst data", engines="vector tensor"),
    "tensor_copy": call("dst", "src", same="dst src", engines="vector scalar gpsimd"),
    "memset": call("dst", value=0.0, engines="vector gpsimd"),
    "tensor_copy_predicated": call("dst", "src", predicate=T(dtype="uint8", dtypes="uint8 uint16 uint32"), same="dst src predicate", same_dtype="dst src", one_psum="src predicate"),
    "tensor_tensor": call("dst", "data1", "data2", op=nl.add, same="dst data1 data2", one_psum="data1 data2", engines="vector gpsimd"),
    "tensor_scalar": call("dst", "data", op0=nl.multiply, operand0=COLUMN, op1=nl.add, operand1=COLUMN, same="dst data", engines="vector scalar gpsimd"),
    "scalar_tensor_tensor": call("dst", "data", op0=nl.add, operand0=ANY_COLUMN, op1=nl.add, operand1=T(), same="dst data operand1", one_psum="data operand1"),
    "reciprocal": call("dst", "data", same="dst data"),
    "tensor_reduce": call(dst=T((8, 1)), op=nl.add, data=T(), axis=1),
    "tensor_scalar_reduce": call("dst", "data", op0=nl.add, operand0=COLUMN, reduce_op=nl.add, reduce_res=ANY_COLUMN, reduce_cmd=nisa.reduce_cmd.load_reduce, reduce_init=COLUMN, same="dst data"),
    "select_reduce": call(dst=T(), predicate=T(dtype="uint8", dtypes=SMALL), on_true=T(dtypes=f"{FLOATS} {SMALL}"), on_false=ANY_COLUMN, reduce_res=T((8, 1), dtypes=FLOATS), same="dst predicate on_true", one_psum="on_true predicate"),
    "range_select": call(dst=T(), on_true_tile=T(dtypes=FLOATS), comp_op0=nl.less, comp_op1=nl.less, bound0=COLUMN, bound1=COLUMN, reduce_res=ANY_COLUMN, same="dst on_true_tile"),
    "tensor_tensor_scan": call("dst", "data0", "data1", initial=ANY_COLUMN, op0=nl.add, op1=nl.add, same="dst data0 data1", one_psum="data0 data1"),
    "activation": call(dst=T(), op=nl.exp, data=T(), bias=ANY_COLUMN, scale=COLUMN, reduce_res=ANY_COLUMN, same="dst data"),
    "activation_reduce": call(dst=T(), op=nl.exp, data=T(), reduce_op=nl.add, reduce_res=ANY_COLUMN, bias=ANY_COLUMN, scale=COLUMN, same="dst data"),
    "bn_stats": call(dst=T((8, 6)), data=T()),
    "bn_aggr": call(dst=T((8, 2)), data=T((8, 6))),
    "max8": call(dst=T(), src=T()),
    "nc_find_index8": call(dst=T(dtype="uint32", dtypes="uint16 uint32"), **index8()),
    "nc_match_replace8": call(dst=T((8, 16)), **index8(), imm=0.0, dst_idx=T(dtype="uint32", dtypes="uint16 uint32"), same="dst data"),
    "nc_stream_shuffle": call(dst=T((32, 8)), src=T((32, 8)), shuffle_mask=[0] * 32, same_dtype="dst src"),
    "iota": call(dst=IN_SBUF, pattern=[[1, 8]]),
    "affine_select": call(dst=IN_SBUF, pattern=[[1, 8]], channel_multiplier=0, on_true_tile=IN_SBUF, on_false_value=0.0, same="dst on_true_tile"),
    "nc_n_gather": call(dst=IN_SBUF, data=IN_SBUF, indices=T(dtype="uint32", where="sbuf", dtypes="uint32"), same="dst indices", same_dtype="dst data"),
    "local_gather": call(dst=T((16, 16), where="sbuf"), src_buffer=T((16, 4), where="sbuf"), index=T((16, 1), "uint16", "sbuf", "uint16"), same_dtype="dst src_buffer"),
    "tensor_partition_reduce": call(dst=T((1, 8), where="sbuf"), op=nl.add, data=IN_SBUF),
    "nonzero_with_count": call(dst=T((16, 9), "int32", "sbuf", "int32"), src=T((16, 8), where="sbuf", dtypes="float32 int32")),
    "scalar_store": call(dst=T((1, 1), "int32", "sbuf hbm", "int32"), src=SCALAR),
    "register_load": call(dst=REGISTER, src=T((1, 1), "int32", "sbuf hbm", INTS)),
    "register_store": call(dst=T((1, 1), "int32", "sbuf hbm"), src=REGISTER),
    "core_barrier": call(data=T(where="hbm"), cores=(0, 1), engines="vector scalar gpsimd tensor sync"),
    "sendrecv": call(src=IN_SBUF, dst=IN_SBUF, send_to_rank=OTHER_CORE, recv_from_rank=OTHER_CORE, pipe_id=0, same="src dst", same_dtype="src dst"),
}  # fmt: skip
BUFFERS = {"sbuf": nl.sbuf, "psum": nl.psum, "hbm": nl.shared_hbm}


def make(argument: Any) -> Any:
    """What a call is given; a tensor is written where it can be, so that a valid call runs."""
    if argument is REGISTER:
        return nisa.register_alloc(0)
    if argument is SCALAR:
        return nisa.scalar_load(nl.zeros((1, 1), "int32"))
    if argument is OTHER_CORE:
        return 1 - nl.program_id(0)
    if not isinstance(argument, T):
        return argument
    made = nl.ndarray(argument.shape, argument.dtype, buffer=BUFFERS[argument.where.split()[0]])
    if made.buffer is nl.shared_hbm:
        if nl.program_id(0) == 0:
            nisa.dma_copy(made, nl.zeros(argument.shape, argument.dtype))
    else:
        nisa.memset(made, 0)
    return made


def emit(name: str, arguments: dict[str, Any]) -> Any:
    """Call the instruction; the shared tensor that it used, if any."""
    made = {n: make(a) for n, a in arguments.items()}
    if name == "dma_compute":
        made["srcs"] = [made["srcs"]]
    getattr(nisa, name)(**made)
    return next((t for t in made.values() if getattr(t, "buffer", None) is nl.shared_hbm), None)


def cores(name: str) -> int:
    return 2 if name in ("core_barrier", "sendrecv") else 1


@pytest.mark.parametrize("name", CALLS)
def test_the_valid_call_runs(name: str) -> None:
    def kernel() -> Any:
        return emit(name, CALLS[name].arguments)

    nki_sim.simulate(nki_sim.jit(kernel)[cores(name)])()


def changes(c: Call) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(title, rule, arguments that differ) of everything that must be refused."""
    tensors = {n: a for n, a in c.arguments.items() if isinstance(a, T)}
    for n, t in tensors.items():
        for where in BUFFERS.keys() - set(t.where.split()):
            yield f"{n} in {where}", "buffer", {n: t._replace(where=where)}
        wrong = next((d for d in f"{INTS} {FLOATS}".split() if t.dtypes and d not in t.dtypes.split()), None)
        if wrong:
            yield f"{n} of {wrong}", "dtype", {n: t._replace(dtype=wrong)}
        if t.shape == (8, 1) and n != "dst":
            for shape in ((8, 2), (4, 1)):
                yield f"{n} {shape}", "shape", {n: t._replace(shape=shape)}
    for n in c.same.split()[1:]:
        rows, columns = tensors[n].shape
        for shape in ((rows, columns + 1), (rows // 2, columns)):
            yield f"{n} {shape}", "shape", {n: tensors[n]._replace(shape=shape)}
    for n in c.same_dtype.split()[1:]:
        yield f"{n} of another dtype", "dtype", {n: tensors[n]._replace(dtype="bfloat16")}
    if c.one_psum:
        yield "both in PSUM", "engine-buffer", {n: tensors[n]._replace(where="psum") for n in c.one_psum.split()}
    for engine in set(ENGINES.split()) - set(c.engines.split()) if c.engines else ():
        yield f"on {engine}", "engine", {"engine": getattr(nisa.engine, engine)}
    if "gpsimd" in c.engines and "op0" not in c.arguments:
        for n, t in tensors.items():
            if "psum" in t.where:
                in_psum = {n: t._replace(where="psum"), "engine": nisa.engine.gpsimd}
                yield f"{n} in PSUM on GpSimd", "engine-buffer", in_psum


CASES = [(name, *change) for name, c in CALLS.items() for change in sorted(changes(c), key=lambda change: change[0])]


@pytest.mark.parametrize(("name", "title", "rule", "change"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_an_operand_that_is_not_what_the_page_says_is_refused(
    name: str, title: str, rule: str, change: dict[str, Any]
) -> None:
    message = refused(rule, lambda: emit(name, CALLS[name].arguments | change), cores(name))
    assert f" {name}: " in message
    if rule in ("buffer", "dtype"):
        assert next(iter(change)) in message


def test_every_instruction_is_here() -> None:
    assert CALLS.keys() | {"register_move", "device_print"} == set(INSTRUCTIONS)
