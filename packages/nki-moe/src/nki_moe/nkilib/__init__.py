"""AWS's nki-library as the provider of the expert MLP: nki_moe.grouped_mlp(..., provider="nkilib").

AWS's blockwise kernels, where AWS's package is installed; the translation of layouts, both ways, is here. `check`
answers without torch and without the package.

Its contract (nki-library d2ad3a5, core/moe/moe_cte/bwmm_shard_on_I.py and
experimental/moe/bwd/blockwise_mm_backward.py) is in layout.py.
"""

from nki_moe.limits import logical_cores

__all__ = ["block_size", "check"]


def check(
    rows: int, experts: int, hidden: int, dim: int, *, dtype: object = "bfloat16", lnc: int | None = None
) -> None:
    """Raise unless AWS's kernels document that they take such experts, forward and backward.

    Args:
        rows: rows of x, at least one.
        experts: experts on this core, at least one.
        hidden: hidden size F of an expert.
        dim: model size D.
        dtype: a torch dtype or its name; bfloat16 only.
        lnc: physical cores of a logical NeuronCore; the environment's (logical_cores) unless given.

    Raises:
        ValueError: the shape does not run, with the nearest sizes that do.
    """
    lnc = logical_cores() if lnc is None else lnc
    name = str(dtype).removeprefix("torch.")
    if lnc != 2:
        raise ValueError(f"lnc={lnc}: nki-library's backward is for LNC=2; provider='own' runs on 1 as well")
    if name != "bfloat16":
        raise ValueError(f"dtype {name}: nki-library's kernels compute in bfloat16; provider='own' takes float32 too")
    if rows < 1 or experts < 1:
        raise ValueError(f"{rows} rows, {experts} experts: there must be at least one of each")
    for what, size, unit, least, most in (("dim (D)", dim, 512, 512, 8192), ("hidden (F)", hidden, 256, 256, 16384)):
        if size % unit or not least <= size <= most:
            low, high = (min(max(n * unit, least), most) for n in (size // unit, -(-size // unit)))
            near = f"{low} or {high}" if low != high else f"{low}"
            raise ValueError(
                f"{what} {size}: nki-library takes multiples of {unit} from {least} to {most}; nearest: {near}"
            )


def block_size(rows: int, experts: int) -> int:
    """Rows of a block: 256 or 512, which forward and backward both take; as many as an expert has on average."""
    return 512 if rows >= 512 * experts else 256
