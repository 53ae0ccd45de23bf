"""The Scalar Engine's own instructions: activation functions with scale, bias and a running reduction."""

from typing import Any

import numpy as np

from nki_sim.constants import reduce_cmd
from nki_sim.dtypes import f32
from nki_sim.isa.vector import like, operands, reducing
from nki_sim.ops import OPS, Op
from nki_sim.program import Instr
from nki_sim.rules import instruction, out, rule, scalar_or_column, tile
from nki_sim.tensor import NkiTensor

OPERANDS: dict[str, Any] = {
    "dst": out(),
    "data": tile(),
    "scale": scalar_or_column(),
    "bias": scalar_or_column(None, optional=True),
    "reduce_res": out(optional=True, column=True),
}


@instruction("S", special=True, same=("dst", "data"), **OPERANDS)
def activation(
    dst: Any,
    op: Op,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Op | None = None,
    reduce_res: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
) -> Any:
    """dst = op(data * scale + bias); the result can be summed over the free axes into the reduce registers."""
    return _activation("activation", dst, op, bias, scale, reduce_op)


@instruction("S", special=True, same=("dst", "data"), **OPERANDS)
def activation_reduce(
    dst: Any, op: Op, data: Any, reduce_op: Op, reduce_res: Any, bias: Any = None, scale: Any = 1.0
) -> Any:
    """activation with reduce_cmd.reset_reduce."""
    return _activation("activation_reduce", dst, op, bias, scale, reduce_op)


def _activation(title: str, dst: NkiTensor, op: Any, bias: Any, scale: Any, reduce_op: Op | None) -> Any:
    rule(
        isinstance(op, Op) and op.activation is not None,
        "op",
        lambda: f"{title}: {op!r} is not an activation function of the Scalar Engine",
    )
    rule(
        reduce_op is None or reduce_op.name == "add",
        "op",
        lambda: f"{title}: reduce_op must be nl.add on trn2; got {reduce_op!r}",
    )

    def body(x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        s, b = operands(rest, dst, scale, bias)
        x = like(f32(x), dst)
        if isinstance(s, np.ndarray) or s != 1.0:
            x = x * np.float32(s) if not isinstance(s, np.ndarray) else x * s
        if b is not None:
            x = x + (b if isinstance(b, np.ndarray) else np.float32(b))
        assert op.activation is not None
        return op.activation(x)  # type: ignore[no-any-return]

    def arguments(instr: Instr) -> dict[str, Any]:
        return {
            "op": OPS["add"],
            "cmd": instr.args.get("reduce_cmd", reduce_cmd.reset_reduce),
            "res": instr.args["reduce_res"],
        }

    return reducing(body, arguments)
