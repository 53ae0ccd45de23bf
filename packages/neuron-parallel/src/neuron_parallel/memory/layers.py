"""The operations of a Qwen3 as TorchTitan 0.3.0 runs it eagerly, with the bytes of every tensor of one core: input to
`tape`.

Letters are those of symbols.py.
"""

from dataclasses import replace

from neuron_parallel.memory.autograd import Op, Sizes
from neuron_parallel.memory.experts import experts
from neuron_parallel.memory.quantity import ZERO, Quantity
from neuron_parallel.memory.symbols import Symbols
from neuron_parallel.plan import Training

__all__ = ["before_head", "block", "embedding", "head_and_loss"]


def block(s: Symbols, training: Training, moe: bool) -> list[Op]:
    """One decoder layer, from "x" to "y"."""
    return [*_attention(s, training), *(_moe(s, training) if moe else _mlp(s))]


def _norm(name: str, source: str, out: str, rows: Quantity, width: Quantity, s: Symbols) -> Op:
    """RMSNorm as torch composes it where no fused kernel exists: x, 1/rms and x/rms in float32 are kept."""
    size = rows * width
    keeps = (source,) if s.a.value == 4 else ()
    new: Sizes = {f"{out}: x in fp32": size * 4} if s.a.value == 2 else {}
    new |= {f"{out}: 1/rms": rows * 4, f"{out}: x/rms": size * 4}
    # forward: x*x, then x/rms*weight in fp32; backward: products of the gradient with weight, x and 1/rms
    fp32 = size * 4
    return Op(
        name,
        (source,),
        {out: size * s.a},
        keeps,
        new,
        weight=width * s.a,
        scratch=fp32 if s.a.value == 2 else ZERO,
        scratch_backward=2 * fp32,
    )


def _gather(source: str, out: str, s: Symbols) -> list[Op]:
    """All-gather of the sequence over tp; nothing without sequence parallel."""
    return [Op(f"all-gather {out}", (source,), {out: s.T * s.D * s.a})] if s.split else []


def _reduce(source: str, out: str, s: Symbols) -> list[Op]:
    """Sum over tp: reduce-scatter to the rank's tokens, or all-reduce."""
    if s.tp == 1:
        return []
    return [Op(f"reduce {out}", (source,), {out: s.t * s.D * s.a})]


def _attention(s: Symbols, training: Training) -> list[Op]:
    T, D, K, H, G, a = s.T, s.D, s.K, s.H, s.G, s.a
    x = "gathered x" if s.split else "norm(x)"
    heads, groups = H * K, G * K
    keys = (T * s.cp * groups * a) if s.cp > 1 else T * groups * a
    k, v = ("all k", "all v") if s.cp > 1 else ("rotated k", "v")
    rope = T * H * K * 4
    ops = [
        _norm("attention norm", "x", "norm(x)", s.t, D, s),
        *_gather("norm(x)", "gathered x", s),
        Op(
            "wqkv",
            (x,),
            {"qkv": T * (heads + 2 * groups) * a},
            (x,),
            weight=(heads + 2 * groups) * D * a,
            selective=True,
            linear=True,
        ),
        Op("split", ("qkv",), {"q": T * heads * a, "k": T * groups * a, "v": T * groups * a}),
        _norm("q norm", "q", "norm(q)", T * H, K, s),
        _norm("k norm", "k", "norm(k)", T * G, K, s),
        Op("rope table", (), {"cos, sin": T * 2 * K * 4}),
        Op(
            "rope q",
            ("norm(q)",),
            {"rotated q": T * heads * a},
            ("cos, sin",),
            # before the result: q's halves swapped and two products in float32; from BF16 also q and k themselves
            scratch=T * H * K * 14 + T * G * K * 4 if a.value == 2 else 2 * rope,
            scratch_backward=2 * rope,
        ),
        Op("rope k", ("norm(k)",), {"rotated k": T * groups * a}, ("cos, sin",)),
    ]
    if s.cp > 1:
        ops += [
            Op("all-gather k", ("rotated k",), {"all k": keys}, part="attention"),
            Op("all-gather v", ("v",), {"all v": keys}, part="attention"),
        ]
    ops.append(_kernel(s, training, k, v))
    ops += [
        Op("wo", ("attended",), {"projected": T * D * a}, ("attended",), weight=heads * D * a, linear=True),
        *_reduce("projected", "reduced", s),
        Op("residual", ("x", "reduced" if s.tp > 1 else "projected"), {"h": s.t * D * a}, alias=True),
    ]
    return ops


def _kernel(s: Symbols, training: Training, k: str, v: str) -> Op:
    T, H, K, S, a = s.T, s.H, s.K, s.S, s.a
    made: Sizes = {"attended": T * H * K * a}
    reads = ("rotated q", k, v)
    if training.attention == "math":
        # scaled copies of q and of k repeated for each query head, v repeated, the scores and their softmax
        scores = T * S * H * a
        repeated = S * s.B * H * K * a
        new: Sizes = {
            "scaled q": T * H * K * a,
            "scaled k": repeated,
            "repeated v": repeated,
            "softmax of scores": scores,
        }
        return Op("attention", reads, made, (), new, scratch=2 * scores, scratch_backward=2 * scores, part="attention")
    new = {"log-sum-exp": T * H * 4}
    if training.attention == "masked":
        new["mask as added to the scores"] = T * S * a
    selective = training.selective_keeps_attention
    return Op("attention", reads, made, (*reads, "attended"), new, part="attention", selective=selective)


def _mlp(s: Symbols) -> list[Op]:
    T, D, F, a = s.T, s.D, s.F, s.a
    x = "gathered h" if s.split else "norm(h)"
    wide = T * F * a
    return [
        _norm("mlp norm", "h", "norm(h)", s.t, D, s),
        *_gather("norm(h)", "gathered h", s),
        Op("w1", (x,), {"w1(h)": wide}, (x,), weight=D * F * a, selective=True, linear=True),
        Op("silu", ("w1(h)",), {"silu": wide}, ("w1(h)",)),
        Op("w3", (x,), {"w3(h)": wide}, (x,), weight=D * F * a, linear=True),
        Op("product", ("silu", "w3(h)"), {"product": wide}, ("silu", "w3(h)")),
        Op("w2", ("product",), {"mlp out": T * D * a}, ("product",), weight=D * F * a, selective=True, linear=True),
        *_reduce("mlp out", "reduced mlp out", s),
        Op("residual 2", ("h", "reduced mlp out" if s.tp > 1 else "mlp out"), {"y": s.t * D * a}, alias=True),
    ]


def _moe(s: Symbols, training: Training) -> list[Op]:
    gathers = s.split and s.ep == 1
    reduces = s.tp > 1 and s.ep == 1
    return [
        _norm("moe norm", "h", "norm(h)", s.t, s.D, s),
        *(_gather("norm(h)", "gathered h", s) if gathers else []),
        *experts(s, training, "gathered h" if gathers else "norm(h)"),
        *(_reduce("moe out", "reduced moe out", s) if reduces else []),
        Op("residual 2", ("h", "reduced moe out" if reduces else "moe out"), {"y": s.t * s.D * s.a}, alias=True),
    ]


def embedding(s: Symbols) -> list[Op]:
    """Look-up; with tp each rank's rows are masked, then summed over ranks."""
    T, D, a = s.T, s.D, s.a
    if s.tp == 1:
        return [Op("embedding", (), {"x": T * D * a}, weight=s.V * D * a)]
    looked_up = Op(
        "embedding",
        (),
        {"looked up": T * D * a},
        (),
        {"ids and rows of this rank": T * (8 + a)},
        weight=s.V * D * a,
        scratch=T * D * a,
    )
    return [looked_up, *_reduce("looked up", "x", s)]


def before_head(s: Symbols, training: Training) -> list[Op]:
    """Final norm, from the last layer's "y" to the head's input; for a chunked loss also the chunks and their
    gradients.
    """
    D, a = s.D, s.a
    ops = [_norm("final norm", "y", "norm(y)", s.t, D, s), *_gather("norm(y)", "gathered y", s)]
    x = "gathered y" if s.split else "norm(y)"
    if training.loss_chunks > 1:
        ops.append(Op("chunks", (x,), {"chunks": s.T * D * a}, (x, "chunks"), {"gradients of chunks": s.T * D * 4}))
    else:
        ops.append(Op("head input", (x,), keeps=(x,)))
    return ops


def head_and_loss(s: Symbols, training: Training) -> list[Op]:
    """Head and loss of all tokens, or of one chunk of them."""
    a = s.a
    T = s.T / training.loss_chunks
    logits = T * s.V * 4
    ops = [Op("head", (), {"logits": T * s.V * a}, weight=s.V * s.D * a, part="logits")]
    if (
        training.loss_chunks > 1
    ):  # the variable that held the last chunk's logits until now, and holds these until the next
        ops[0] = replace(ops[0], scratch=T * s.V * a, keeps=("logits",))
    source = "logits"
    if s.a.value == 2:
        ops.append(Op("logits to fp32", ("logits",), {"logits in fp32": logits}, part="logits"))
        source = "logits in fp32"
    loss: Sizes = {"loss": Quantity(4, "4")}
    if s.tp > 1:
        # TorchTitan's vocabulary-parallel loss: shifted logits, their exponentials, and both again backward
        new: Sizes = {"log-probabilities": logits}
        return [*ops, Op("loss", (source,), loss, (), new, scratch=logits, scratch_backward=2 * logits, part="logits")]
    return [
        *ops,
        Op("log-softmax", (source,), {"log-probabilities": logits}, ("log-probabilities",), part="logits"),
        Op("loss", ("log-probabilities",), loss, (), part="logits"),
    ]
