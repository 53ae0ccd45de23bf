"""The backend `neuron` of torch.compile: each graph is checked for what the device's compiler refuses, counted, and
run.

A graph runs as CPU kernels in the graph's order, so that its results are eager's. What is emulated is the contract:
static shapes, the default mode, no sort, one compilation for each graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuron_emu.build import extension

__all__ = ["neuron"]

SORTS = {"sort", "argsort", "msort"}


def neuron(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What torch.compile(backend="neuron") calls for each graph.

    Raises:
        RuntimeError: a symbolic size, a mode that is not the default, or a sort (InvalidBackend errors wrap it in
            Dynamo's).
    """
    from torch._dynamo.backends.common import aot_autograd

    from neuron_emu.start import is_enabled

    if not is_enabled():
        raise RuntimeError(
            "torch.compile(backend='neuron') found neuron-emu, which is not enabled; call neuron_emu.enable()"
        )
    if mode not in (None, "default"):
        extension().meet(
            "compile-mode", mode, f"torch.compile on neuron has the default mode alone, found mode={mode!r}."
        )
    _refuse_symbolic(example_inputs)
    compiled: Callable[..., Any] = aot_autograd(fw_compiler=_compile, bw_compiler=_compile)(gm, example_inputs)
    return compiled


def _refuse_symbolic(inputs: Sequence[Any]) -> None:
    for value in inputs:
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            extension().meet(
                "symbolic-size",
                str(tuple(sizes)),
                f"torch.compile on neuron takes static shapes alone, found {tuple(sizes)}. Pass "
                f"dynamic=False, pad to fixed "
                "lengths, or mark_static what changes.",
            )


def _compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import make_boxed_func

    native = extension()
    _refuse_symbolic(example_inputs)
    for node in gm.graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if name in SORTS:
            native.meet(
                "sort-compiled",
                name,
                f"{name} does not compile for neuron (NCC_EVRF029). Find positions by comparison and cumsum instead.\n"
                f"{node.stack_trace or ''}",
            )
    native.note("graph", f"{sum(node.op == 'call_function' for node in gm.graph.nodes)} operators")
    native.compile_delay()

    def run(*args: Any) -> Any:
        native.enter_graph()
        try:
            return gm(*args)
        finally:
            native.exit_graph()

    return make_boxed_func(run)
