"""What the nki_sim tests share: run one instruction on arrays, or see it refused by a rule."""

from collections.abc import Callable
from typing import Any

import nki_sim
import nki_sim.isa as nisa
import nki_sim.language as nl
import numpy as np
import pytest


def run(
    body: Callable[..., Any], *arrays: np.ndarray, dst: tuple[tuple[int, ...], str], before: np.ndarray | None = None
) -> np.ndarray:
    """dst after body(dst, *tiles), everything in SBUF; dst holds `before` at first when given."""

    def kernel(inputs: tuple[Any, ...], start: Any) -> Any:
        tiles = [nl.load(x) for x in inputs]
        target = nl.ndarray(*dst)
        if start is not None:
            nisa.dma_copy(target, start)
        body(target, *tiles)
        out = nl.ndarray(*dst, buffer=nl.shared_hbm)
        nisa.dma_copy(out, target)
        return out

    return nki_sim.simulate(kernel)(arrays, before)


def refused(rule: str, body: Callable[[], Any], cores: int = 1, error: type[Exception] = nki_sim.NkiError) -> str:
    """The message with which a kernel running `body` is refused; it must start with the rule and name this test's line."""

    def kernel() -> None:
        body()

    with pytest.raises(error) as caught:
        nki_sim.simulate(nki_sim.jit(kernel)[cores])()
    message = str(caught.value)
    assert message.startswith(rule) or error is not nki_sim.NkiError, message
    if isinstance(caught.value, nki_sim.NkiError):
        assert (
            rule in ("", caught.value.rule) and caught.value.where is not None and "/tests/" in caught.value.where.file
        ), message
    return message


def sb(*shape: int, dtype: str = "float32") -> Any:
    """A filled SBUF tile."""
    return nl.zeros(shape, dtype)


def ps(*shape: int, dtype: str = "float32") -> Any:
    """An unwritten PSUM tile."""
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def hbm(*shape: int, dtype: str = "float32") -> Any:
    """An unwritten shared HBM tensor."""
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def randn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
