"""The contract: what an author gets wrong most is answered by one clear message with the kernel's line. mistakes.txt is the golden file.

uv run python tests/nki_sim/test_mistakes.py    # writes it anew, to be read before it is committed
"""

import re
import warnings
from pathlib import Path

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np

GOLDEN = Path(__file__).parent / "mistakes.txt"
BF = {"dtype": "bfloat16"}


def sb(*shape, dtype="float32"):
    return nl.zeros(shape, dtype)


def raw(*shape, dtype="float32", buffer=nl.sbuf):
    return nl.ndarray(shape, dtype, buffer=buffer)


def ps(*shape, dtype="float32"):
    return raw(*shape, dtype=dtype, buffer=nl.psum)


def hbm(*shape, dtype="float32"):
    return raw(*shape, dtype=dtype, buffer=nl.hbm)


def register(value=0):
    return nisa.register_alloc(value)


def shared(barrier_after=False):
    """Core 0 writes, core 1 reads, nobody waits."""
    out = nl.ndarray((8, 4), "float32", buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, sb(8, 4))
    else:
        nisa.dma_copy(raw(8, 4), out)
    return out


def unequal():
    nl.fori_loop(0, 2 + nl.program_id(0), lambda i: None)


def rewritten():
    bound = register(2)
    nl.fori_loop(0, bound, lambda i: nisa.register_move(bound, 1) and None)


def escaped():
    kept = []
    nl.fori_loop(0, 1, lambda i: kept.append(sb(1, 4)))
    nisa.tensor_copy(sb(1, 4), kept[0])


def moved(rows):
    return hbm(256, 128, **BF).ap([[128, rows], [1, 128]], scalar_offset=register(), indirect_dim=0)


def one_core_waits():
    out = nl.ndarray((8, 4), "float32", buffer=nl.shared_hbm)
    if nl.program_id(0):
        nisa.core_barrier(out, (0, 1))
    return out


MISTAKES = {
    "more partitions than there are": lambda: raw(129, 4),
    "a tile that starts in the middle of a quadrant": lambda: nisa.memset(sb(128, 4)[8:16], 0),
    "a matmul with more than 512 columns": lambda: nisa.nc_matmul(
        ps(128, 1024), sb(128, 128, **BF), sb(128, 1024, **BF)
    ),
    "a matmul whose stationary tile is too wide": lambda: nisa.nc_matmul(
        ps(128, 8), sb(128, 256, **BF), sb(128, 8, **BF)
    ),
    "contraction dimensions that differ": lambda: nisa.nc_matmul(ps(64, 8), sb(128, 64, **BF), sb(64, 8, **BF)),
    "a matmul into SBUF": lambda: nisa.nc_matmul(sb(8, 8), sb(8, 8, **BF), sb(8, 8, **BF)),
    "accumulating on a memset": lambda: (
        p := ps(8, 8),
        nisa.memset(p, 0),
        nisa.nc_matmul(p, sb(8, 8), sb(8, 8), accumulate=True),
    ),
    "float32 times bfloat16": lambda: nisa.nc_matmul(ps(8, 8), sb(8, 8), sb(8, 8, **BF)),
    "a DMA from PSUM": lambda: nisa.dma_copy(hbm(8, 4), ps(8, 4)),
    "a copy between unequal sizes": lambda: nisa.dma_copy(sb(8, 4), hbm(8, 5)),
    "computing on HBM": lambda: nisa.tensor_tensor(sb(8, 4), hbm(8, 4), sb(8, 4), nl.add),
    "both operands in PSUM": lambda: nisa.tensor_tensor(sb(8, 4), ps(8, 4), ps(8, 4), nl.add),
    "GpSimd on PSUM": lambda: nisa.tensor_copy(sb(8, 4), ps(8, 4), engine=nisa.engine.gpsimd),
    "dividing in the ALU": lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), nl.divide),
    "an activation function as an ALU operator": lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.exp, 1.0),
    "an operator by its name": lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), "add"),
    "an operator of Trn3": lambda: nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 4), nl.abs_max),
    "an instruction of Trn3": lambda: nisa.nc_matmul_mx(sb(8, 4)),
    "a float for an integer tensor": lambda: nisa.memset(raw(8, 4, dtype="int32"), 2.0),
    "reducing over the partitions": lambda: nisa.tensor_reduce(sb(1, 4), nl.add, sb(8, 4), axis=0),
    "the sine of nine": lambda: nisa.activation(sb(8, 4), nl.sin, nl.full((8, 4), 9.0, "float32")),
    "the logarithm of zero": lambda: nisa.activation(sb(8, 4), nl.log, sb(8, 4)),
    "reading what nothing wrote": lambda: nisa.tensor_copy(sb(8, 4), raw(8, 4)),
    "more SBUF than there is": lambda: nisa.tensor_copy(raw(128, 30_000), sb(128, 30_000)),
    "a slice past the end": lambda: sb(8, 4)[:, 2:6],
    "an index past the end": lambda: nisa.dma_copy(raw(1, 4), hbm(8, 4)[nl.ds(register(9), 1)]),
    "a pattern of seven dimensions": lambda: hbm(8, 6).ap([[1, 1]] * 7),
    "a pattern on a slice": lambda: sb(8, 6)[:, 2:].ap([[6, 8], [1, 2]]),
    "a reshape that needs a copy": lambda: sb(8, 4, 6)[:, :, 0:3].reshape((8, 12)),
    "assigning to a slice": lambda: sb(8, 4).__setitem__(0, 1.0),
    "adding two tiles in Python": lambda: sb(8, 4) + sb(8, 4),
    "branching on a tile": lambda: 1 if sb(8, 4) else 0,
    "a range over a register": lambda: range(register(3)),
    "adding to a register": lambda: register(3) + 1,
    "comparing a scalar": lambda: nisa.scalar_load(sb(1, 1, dtype="int32")) < 3,
    "a loop that differs between the cores": (unequal, 2),
    "a loop that runs no pass": lambda: nl.fori_loop(4, 4, lambda i: None),
    "a loop of too many passes": lambda: nl.fori_loop(0, 5000, lambda i: None),
    "rewriting a loop's bound": rewritten,
    "assigning a loop's counter": lambda: nl.fori_loop(0, 2, lambda i: nisa.register_move(i, 0) and None),
    "a loop's tensor after the loop": escaped,
    "a loop body that returns": lambda: nl.fori_loop(0, 2, lambda i: i),
    "a missing barrier": (shared, 2),
    "a barrier that one core reaches": (one_core_waits, 2),
    "a barrier on one core": lambda: nisa.core_barrier(nl.ndarray((8, 4), "float32", buffer=nl.shared_hbm), (0, 1)),
    "a DMA transpose at a run-time address": lambda: nisa.dma_transpose(raw(128, 64, **BF), moved(64)),
    "a DMA transpose into another shape": lambda: nisa.dma_transpose(raw(4, 6), hbm(2, 3, 4)),
    "a mistyped instruction": lambda: nisa.tensor_tenser(sb(8, 4), sb(8, 4), sb(8, 4), nl.add),
    "a mistyped name of nl": lambda: nl.share_hbm,
    "a mistyped keyword": lambda: nisa.tensor_copy(dst=sb(8, 4), scr=sb(8, 4)),
    "a keyword of NKI 0.1": lambda: nisa.tensor_copy(dst=sb(8, 4), src=sb(8, 4), dtype="float32"),
    "a missing argument": lambda: nisa.tensor_scalar(sb(8, 4), sb(8, 4), nl.add),
    "a number for a tensor": lambda: nisa.tensor_copy(sb(8, 4), 1.0),
    "an enumeration by its name": lambda: nisa.tensor_copy(sb(8, 4), sb(8, 4), engine="vector"),
    "a dtype that does not exist": lambda: raw(8, 4, dtype="float64"),
    "a forgotten return": lambda: nisa.dma_copy(nl.ndarray((8, 4), "float32", buffer=nl.shared_hbm), sb(8, 4)) and None,
}


def answer(body):
    """What the author reads: paths and lines of this file, but for its name, left out."""
    body, cores = body if isinstance(body, tuple) else (body, 1)

    def kernel():
        result = body()
        return result if getattr(result, "buffer", None) is nl.shared_hbm else None

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nki_sim.simulate(nki_sim.jit(kernel)[cores])()
    except Exception as error:
        return f"{type(error).__name__}: " + re.sub(
            r"[^ (\[]*test_mistakes\.py:\d+", "test_mistakes.py:LINE", str(error)
        )
    return "accepted"


def golden():
    return "".join(f"# {title}\n{answer(body)}\n\n" for title, body in MISTAKES.items())


def test_each_mistake_is_answered_as_the_golden_file_says():
    assert golden() == GOLDEN.read_text()


def test_the_golden_file_is_worth_comparing_with():
    text = GOLDEN.read_text()
    answers = [block.split("\n")[1] for block in text.strip().split("\n\n")]
    assert len(answers) == len(MISTAKES) >= 40 and "accepted" not in answers
    without = [a for a in answers if "test_mistakes.py:LINE" not in a]
    assert not without, without


def test_the_race_is_called_one_in_every_order():
    for order in ("core0", "core1", "alternate"):
        try:
            nki_sim.simulate(nki_sim.jit(shared)[2], order=order)()
        except nki_sim.NkiError as error:
            assert error.rule == "race", error
        else:
            raise AssertionError(order)


def test_a_word_of_the_near_name_is_given():
    assert "did you mean 'tensor_tensor'" in answer(MISTAKES["a mistyped instruction"])
    assert "did you mean 'shared_hbm'" in answer(MISTAKES["a mistyped name of nl"])
    assert "did you mean 'src'" in answer(MISTAKES["a mistyped keyword"])


def test_an_array_where_the_kernel_has_too_few_parameters_names_the_kernel():
    try:
        nki_sim.simulate(lambda x: x)(np.zeros((2, 2), np.float32), 1)
    except TypeError as error:
        assert "too many positional" in str(error) and "test_mistakes.py" in str(error)
    else:
        raise AssertionError("accepted")


if __name__ == "__main__":
    GOLDEN.write_text(golden())
