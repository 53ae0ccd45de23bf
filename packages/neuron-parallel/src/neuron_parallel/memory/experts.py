"""Router, dispatch, grouped products and combine of a mixture of experts, by dispatcher (letters: symbols.py).

    gather       titan_recipes' default: rows by index; with expert parallel all-gather before and reduce-scatter after
    capacity     titan_recipes': all-to-all of equal splits
    all-to-all   TorchTitan's, as many rows as were routed

int64 indices are 8 bytes, routing scores float32.
"""

from neuron_parallel.memory.autograd import Op, Sizes
from neuron_parallel.memory.quantity import ZERO, Quantity
from neuron_parallel.memory.symbols import Symbols
from neuron_parallel.plan import Training

__all__ = ["experts"]


def experts(s: Symbols, training: Training, x: str) -> list[Op]:
    """The operations from the router's input `x` to "moe out"."""
    if training.dispatcher == "all-to-all":
        before, after = _sorted(s, x)
    elif s.ep == 1:
        before, after = _by_index(s, x, s.m, s.R, "weights")
    else:
        before, after = _gathered(s, x) if training.dispatcher == "gather" else _sent(s, x)
    return [*_router(s, x), *before, *_products(s), *after]


def _router(s: Symbols, x: str) -> list[Op]:
    D, E, N, m, a = s.D, s.E, s.N, s.m, s.a
    scores = m * E * 4
    fp32: Sizes = {"h in fp32": m * D * 4, "gate weight in fp32": E * D * 4} if a.value == 2 else {}
    return [
        Op("gate", (x,), {"gate": scores}, () if fp32 else (x,), fp32, weight=E * D * a, linear=True),
        Op("softmax", ("gate",), {"probabilities": scores}, ("probabilities",)),
        Op("top-k", (), {"expert ids": m * s.k * 8, "top values": m * s.k * 4}, scratch=m * E, selective=True),
        Op("chosen weights", ("probabilities",), {"chosen": m * s.k * 4}, ("expert ids",)),
        Op("normalise", ("chosen",), {"weights": N * 4}, ("chosen",), {"sum of chosen": m * 4}),
    ]


def _products(s: Symbols) -> list[Op]:
    """The operations from "rows" to "expert out".

    Experts of another dtype than their rows (TorchTitan's are BF16) cast both: the casts for w1 and w3 are two tensors
    each, the cast for w2 is one.
    """
    rows, wide = s.R * s.D, s.R * s.M * s.c
    matrix = s.E / s.ep * s.M * s.D
    casts = s.a.value != s.c.value
    keeps = () if casts else ("rows",)

    def cast(name: str) -> Sizes:
        return {f"cast of rows for {name}": rows * s.c, f"cast of {name}": matrix * s.c} if casts else {}

    weight = matrix * s.a
    w2: Sizes = {"cast of w2": matrix * s.c} if casts else {}
    return [
        Op("expert w1", ("rows",), {"expert w1": wide}, keeps, cast("w1"), weight=weight),
        Op("expert silu", ("expert w1",), {"expert silu": wide}, ("expert w1",)),
        Op("expert w3", ("rows",), {"expert w3": wide}, keeps, cast("w3"), weight=weight),
        Op("expert product", ("expert silu", "expert w3"), {"expert product": wide}, ("expert silu", "expert w3")),
        Op("expert w2", ("expert product",), {"expert out": rows * s.a}, ("expert product",), w2, weight=weight),
    ]


def _take(s: Symbols, x: str, out: str, choices: Quantity, rows: Quantity, some: bool) -> Op:
    """Take a row for each choice, or for some choices (`some`).

    The operation keeps where each choice went, and the choice of each row.
    """
    kept: Sizes = {f"row of each choice: {out}": choices * 8, f"choice of each row: {out}": rows * 8}
    if some:
        kept |= {f"has a row: {out}": choices, f"has a choice: {out}": rows}
    return Op(
        f"take {out}",
        (x,),
        {out: rows * s.D * s.a},
        (),
        kept,
        scratch=rows * 8,
        scratch_backward=_at_once(choices) * s.D * s.a,
        part="dispatch",
    )


def _at_once(rows: Quantity) -> Quantity:
    """The rows that titan_recipes.moe.permute works on at once: a sixteenth of them, or 1,024."""
    return rows / 16 if rows.value > 16 * 1024 else Quantity(min(rows.value, 1024), f"min({rows}, 1024)")


def _combine(s: Symbols, source: str, weights: str, out: str, tokens: Quantity, rows: Quantity) -> Op:
    """Sum a token's rows, multiplied by their weights in float32.

    Backward there is a product for each of the two gradients.
    """
    half = s.a.value == 2
    choices = _at_once(tokens * s.k)
    return Op(
        f"combine {out}",
        (source, weights),
        {out: tokens * s.D * s.a},
        (source, weights),
        scratch=choices * s.D * s.a + (choices * s.D * 4 if half else ZERO),
        scratch_backward=(3 if half else 1) * _at_once(rows) * s.D * 4,
        part="dispatch",
    )


def _by_index(
    s: Symbols, x: str, tokens: Quantity, rows: Quantity, weights: str, out: str = "moe out"
) -> tuple[list[Op], list[Op]]:
    some = s.ep > 1
    take = _take(s, x, "rows", tokens * s.k, rows, some)
    return [take], [_combine(s, "expert out", weights, out, tokens, rows)]


def _gathered(s: Symbols, x: str) -> tuple[list[Op], list[Op]]:
    """Each rank gets the group's tokens and their routing. The combined outputs are summed on each token's own rank."""
    group = s.m * Quantity(s.ep, "ep")
    before, after = _by_index(s, "all tokens", group, s.R, "all weights", "combined")
    gathers = [
        Op("all-gather tokens", (x,), {"all tokens": group * s.D * s.a}, part="dispatch"),
        Op("all-gather routing", ("weights",), {"all weights": group * 2 * s.k * 4}, part="dispatch"),
    ]
    scatter = Op("reduce-scatter", ("combined",), {"moe out": s.m * s.D * s.a}, part="dispatch", selective=True)
    return [*gathers, *before], [*after, scatter]


def _sent(s: Symbols, x: str) -> tuple[list[Op], list[Op]]:
    """Each rank sends R rows, receives R rows, and sends them back."""
    sent = s.R * s.D * s.a
    before = [
        _take(s, x, "to send", s.N, s.R, True),
        Op("all-to-all", ("to send",), {"received": sent, "received ids": s.R * 8}, part="dispatch", selective=True),
        _take(s, "received", "rows", s.R, s.R, True),
    ]
    after = [
        Op("order by rank", ("expert out",), {"to return": sent}, scratch=sent, part="dispatch"),
        Op("all-to-all back", ("to return",), {"returned": sent}, part="dispatch", selective=True),
        _combine(s, "returned", "weights", "moe out", s.m, s.R),
    ]
    return before, after


def _sorted(s: Symbols, x: str) -> tuple[list[Op], list[Op]]:
    """TorchTitan's dispatcher: copies sorted by expert, exchanged as routed, weighed in float32, added up by index."""
    D, N, R, m, a = s.D, s.N, s.R, s.m, s.a
    exchange, half = s.ep > 1, s.a.value == 2
    received = R * D * a
    copies = "sorted tokens" if exchange else "rows"
    before = [
        Op(
            "sort weights",
            ("weights",),
            {"sorted weights": N * 4},
            (),
            {"order": N * 8},
            scratch=N * 8,
            part="dispatch",
        ),
        Op("sort tokens", (x,), {copies: N * D * a}, (), {"token of row": N * 8}, part="dispatch"),
    ]
    after: list[Op] = []
    out = "expert out"
    if exchange:
        order: Sizes = {"row order": R * 8}
        before += [
            Op("all-to-all", (copies,), {"received": received}, part="dispatch", selective=True),
            Op("order by expert", ("received",), {"rows": received}, (), order, scratch=2 * R * 8, part="dispatch"),
        ]
        after += [
            Op("order by rank", (out,), {"to send": received}, ("row order",), part="dispatch"),
            Op("all-to-all back", ("to send",), {"returned": N * D * a}, part="dispatch", selective=True),
        ]
        out = "returned"
    fp32: Sizes = {"rows in fp32": N * D * 4} if half else {}
    after += [
        Op(
            "weigh",
            (out, "sorted weights"),
            {"weighed": N * D * a},
            ("sorted weights", *(() if half else (out,))),
            fp32,
            scratch=N * D * 4 if half else ZERO,
            scratch_backward=N * D * 4,
            part="dispatch",
        ),
        Op("add up", ("weighed",), {"moe out": m * D * a}, ("token of row",), scratch=m * D * a, part="dispatch"),
    ]
    return before, after
