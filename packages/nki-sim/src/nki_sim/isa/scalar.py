"""The Scalar Engine's own instructions: activation functions with scale, bias and a running sum."""

import numpy as np

from nki_sim.constants import reduce_cmd
from nki_sim.dtypes import f32
from nki_sim.errors import need
from nki_sim.instruction import COLUMN, IN, OUT, OUT_COLUMN, REQUIRED, Args, Compute, instruction
from nki_sim.isa.vector import ANY_COLUMN, like, operands, reducing
from nki_sim.ops import OPS, Op, need_range

BIAS = ANY_COLUMN._replace(optional=True)
SCALE = COLUMN._replace(default=1.0)


@instruction("S", special=True, same="dst data", dst=OUT, op=REQUIRED, data=IN, bias=BIAS, scale=SCALE, reduce_op=None, reduce_res=OUT_COLUMN, reduce_cmd=reduce_cmd.idle)  # fmt: skip
def activation(a: Args) -> Compute:
    """dst = op(data * scale + bias); the result can be summed over the free axes into the reduce registers."""
    need(isinstance(a.op, Op) and a.op.activation, "op", "{!r} is no activation function of the Scalar Engine", a.op)
    summing = a.reduce_op is None or a.reduce_op.name == "add"
    need(summing, "op", "reduce_op must be nl.add on trn2; got {!r}", a.reduce_op)

    def body(x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        bias, scale = operands(rest, a.dst, a.bias, a.scale)
        x = like(f32(x), a.dst)
        x = x if isinstance(a.scale, (int, float)) and a.scale == 1 else x * scale
        x = x if bias is None else x + bias
        need_range(a.op, x)
        return a.op.activation(x)

    return reducing(a, OPS["add"], getattr(a, "reduce_cmd", reduce_cmd.reset_reduce), body)


@instruction("S", special=True, same="dst data", dst=OUT, op=REQUIRED, data=IN, reduce_op=REQUIRED, reduce_res=OUT_COLUMN, bias=BIAS, scale=SCALE)  # fmt: skip
def activation_reduce(a: Args) -> Compute:
    """activation with reduce_cmd.reset_reduce."""
    return activation.body(a)  # type: ignore[attr-defined]
