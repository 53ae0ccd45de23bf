"""RoPE as an NKI kernel: queries and keys of 128 tokens at a time, in float32, rounded once.

The two cores of an LNC2 pair take tokens in turn, and half each of what 128 does not divide.
"""

from typing import Any

from nki_moe.hardware import P
from nki_moe.toolchain import nisa, nki, nl


@nki.jit
def rope(q: Any, k: Any, cos: Any, sin: Any, head_dim: int, inverse: bool) -> Any:
    """q (T, N H) and k (T, M H) turned by the angles of cos, sin (T, H), of which the first half is read.

    Pseudocode: for 128 tokens, for q and k: [a | b] -> [a cos - b sin | b cos + a sin]; inverse: sin -> -sin
    """
    core, cores = nl.program_id(0), nl.num_programs(0)
    outputs = [nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm) for x in (q, k)]
    tokens, half = q.shape[0], head_dim // 2

    def tile(t: Any, n: int, first: int) -> None:
        def load(x: Any, width: int) -> Any:
            x_sb = nl.ndarray((n, width), x.dtype, buffer=nl.sbuf)
            row = x.shape[1]
            nisa.dma_copy(x_sb, x.ap([[row, n], [1, width]], offset=first * row, scalar_offset=t, indirect_dim=0))
            return x_sb

        cos_sb, sin_sb = load(cos, half), load(sin, half)
        for x, out in zip((q, k), outputs, strict=True):
            width = x.shape[1]
            heads = width // head_dim
            x_sb, y_sb = load(x, width), nl.ndarray((n, width), x.dtype, buffer=nl.sbuf)

            def part(z_sb: Any, i: int, heads: int = heads) -> Any:
                return z_sb.reshape_dim(1, (heads, 2, half))[:, :, i, :]

            def per_head(z_sb: Any, heads: int = heads) -> Any:
                return z_sb.expand_dim(1).broadcast(1, heads)

            for i, op in ((0, nl.add if inverse else nl.subtract), (1, nl.subtract if inverse else nl.add)):
                own_sb = nl.ndarray((n, heads, half), nl.float32, buffer=nl.sbuf)
                other_sb = nl.ndarray((n, heads, half), nl.float32, buffer=nl.sbuf)
                nisa.tensor_tensor(own_sb, part(x_sb, i), per_head(cos_sb), nl.multiply)
                nisa.tensor_tensor(other_sb, part(x_sb, 1 - i), per_head(sin_sb), nl.multiply)
                nisa.tensor_tensor(part(y_sb, i), own_sb, other_sb, op)
            nisa.dma_copy(out.ap([[width, n], [1, width]], offset=first * width, scalar_offset=t, indirect_dim=0), y_sb)

    whole = tokens - tokens % (P * cores)
    if whole:
        nl.fori_loop(0, whole, lambda t: tile(t, P, core * P), step=P * cores)
    rest = (tokens - whole) // cores
    if rest:
        tile(nisa.register_alloc(whole), rest, core * rest)
    return tuple(outputs)
