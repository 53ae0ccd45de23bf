"""The operators on Trainium: the kernels as `torch_neuronx.nki_op`s, registered when a neuron tensor first needs them.

What torch_neuronx asks of such a function (2.14, from AWS's documentation): every argument annotated; it calls the
kernel, and is its own fake implementation; what is no tensor is a hashable constant; gradients are ours to register.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import Tensor

from nki_moe.arguments import no_second_derivative
from nki_moe.backend import Provider
from nki_moe.experts import op as experts
from nki_moe.experts import torch_path
from nki_moe.experts.launch import Own
from nki_moe.limits import logical_cores
from nki_moe.nkilib.launch import Nkilib
from nki_moe.rotary import op as rope
from nki_moe.rotary.reference import rotate
from nki_moe.work import Work

__all__ = ["CHECK_SECONDS", "register"]

CHECK_SECONDS = "NKI_MOE_CHECK_SECONDS"
"""The variable with the seconds that a self-check may take; 1,800 when unset."""

Kernels = Literal["own", "nkilib", "rope"]
"""What is proven at once: a provider's experts, or RoPE."""

_checked: dict[tuple[str, str], bool] = {}


@torch.compiler.assume_constant_result
def register(device_type: str, kernels: Kernels = "own") -> bool:
    """Make torch.ops.nki_moe.{grouped_mlp_nki, ..., rope_nki} exist, and prove these kernels once on a small input.

    Args:
        device_type: the device that runs them.
        kernels: which of them to prove.

    Returns:
        True, once their answers are torch's.

    Raises:
        RuntimeError: they are not, with the versions at hand. After some SDK upgrades, kernels of an old namespace
            imported and returned zeros.
    """
    if not hasattr(torch.ops.nki_moe, "grouped_mlp_nki"):
        _define()
    key = device_type, kernels
    if key not in _checked:
        try:
            self_check(device_type, kernels)
        except BaseException:
            _checked[key] = False
            raise
        _checked[key] = True
    if not _checked[key]:
        raise RuntimeError(
            "nki-moe's self-check failed before in this process; NKI_MOE_BACKEND=torch runs without kernels"
        )
    return True


def run(kernel: Any, lnc: int, *tensors: Tensor, **constants: Any) -> Any:
    """Launch on the pair of cores (or the one) of a logical NeuronCore.

    A kernel is compiled for its sizes: where torch.compile has made one symbolic, it is fixed here, with a guard;
    and for tensors that lie in memory in order.

    Returns:
        What the kernel returns: a tuple, or for one result that tensor.
    """
    fixed = {name: int(value) if isinstance(value, torch.SymInt) else value for name, value in constants.items()}
    return _wrapped(kernel, lnc)(*(t.contiguous() for t in tensors), **fixed)


@cache
def _wrapped(kernel: Any, lnc: int) -> Any:
    """The kernel as torch_neuronx launches it, wrapped once, since each wrap registers it again.

    The grid is a tuple. A torch_neuronx whose kernels take no grid (AWS announces that NEURON_LOGICAL_NC_CONFIG
    replaces it) launches on what that variable says, which limits.logical_cores has read.
    """
    import torch_neuronx

    wrapped = torch_neuronx.wrap_nki(kernel)
    if hasattr(type(wrapped), "__getitem__"):
        return wrapped[(lnc,)]
    if lnc != logical_cores():
        raise RuntimeError(
            f"this torch-neuronx launches kernels on NEURON_LOGICAL_NC_CONFIG={logical_cores()} cores; {lnc} were "
            "asked for. Set the variable"
        )
    return wrapped


def _define() -> None:
    import torch_neuronx

    def register(name: str) -> Any:
        return torch_neuronx.nki_op(f"nki_moe::{name}_nki", mutates_args={})

    @register("rope")
    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        return rope.launch(q, k, cos, sin, inverse, run)

    work = {"own": Own(run), "nkilib": Nkilib(run)}
    setup, backward = experts.differentiate(experts.define(register, lambda _, provider: work[provider], look=False))
    torch.library.register_autograd("nki_moe::grouped_mlp_nki", backward, setup_context=setup)
    torch.library.register_autograd("nki_moe::grouped_mlp_backward_nki", no_second_derivative)
    setup, backward = rope.differentiate(turn)
    torch.library.register_autograd("nki_moe::rope_nki", backward, setup_context=setup)


def self_check(device_type: str, kernels: Kernels = "own") -> None:
    """Compare small forwards and backwards with torch's, whatever the caller's grad mode is.

    Raises:
        RuntimeError: results that differ. A check that does not end within CHECK_SECONDS ends the process, since
            nothing else stops a device that hangs.
    """
    with time_limit(float(os.environ.get(CHECK_SECONDS, 1800)), f"nki-moe self-check of {kernels} kernels"):
        with torch.inference_mode(False), torch.enable_grad():
            results = _rope_results(device_type) if kernels == "rope" else _expert_results(device_type, kernels)
        for name, (found, expected) in results.items():
            found, expected = found.detach().cpu().float(), expected.detach().float()
            error = float((found - expected).norm() / expected.norm())
            if not error < 2e-2:
                zeros = " (all zeros)" if not found.any() else ""
                raise RuntimeError(
                    f"nki-moe self-check: {kernels} kernels' {name} on a fixed small input differs from torch's by "
                    f"{error:.1e} relative{zeros}, at most 2e-2 expected. Found {_versions()}; docs/kernels.md names "
                    "versions that go together. NKI_MOE_BACKEND=torch runs without kernels"
                )


@contextmanager
def time_limit(seconds: float, what: str, end: Callable[[int], Any] = os._exit) -> Iterator[None]:
    """End the process when the body takes longer, with the versions at hand and every thread's stack on stderr.

    A hung device leaves Python inside a call that no exception reaches, and the other ranks in a collective.
    """

    def expired() -> None:
        print(
            f"{what} did not end within {seconds:g} s; found {_versions()}. A device loop may hang: "
            f"NKI_MOE_BACKEND=torch runs without kernels. {CHECK_SECONDS} sets the limit; compiling takes minutes",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=2, all_threads=True)  # whatever sys.stderr has become
        end(1)

    timer = threading.Timer(seconds, expired)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _expert_results(device_type: str, provider: Provider) -> dict[str, tuple[Tensor, Tensor]]:
    """y and every gradient, by kernels and by torch; and y without gradients, which is another program.

    A kernel that mixes up items, experts or passes gets this routing wrong: an expert has several items, others none,
    one row, or a full block.
    """
    generator = torch.Generator().manual_seed(0)
    counts_E = torch.tensor([300, 0, 1, 71, 0, 128])
    D = 256 if provider == "own" else 512  # the smallest that each takes
    shapes = ((513, D), (6, 256, D), (6, D, 256), (6, 256, D))
    x, w1, w2, w3 = ((torch.randn(s, generator=generator) * 0.2).bfloat16() for s in shapes)
    work = Work(counts_E, w1, w2, w3, None, None, None)
    y, *saved = torch_path.forward(x, work, True)
    dx, _, *dws = torch_path.backward(y, x, work, *saved, True)

    ours = [t.to(device_type).requires_grad_() for t in (x, w1, w2, w3)]
    run = torch.ops.nki_moe.grouped_mlp_nki
    args = (ours[0], counts_E.to(device_type), *ours[1:], None, None, None)
    out = run(*args, True, provider)[0]
    found = (out, *torch.autograd.grad(out, ours, y.to(device_type)))
    results = dict(zip(("y", "dx", "dw1", "dw2", "dw3"), zip(found, (y, dx, *dws), strict=True), strict=True))
    with torch.no_grad():
        return {**results, "y without gradients": (run(*args, False, provider)[0], y)}


def _rope_results(device_type: str) -> dict[str, tuple[Tensor, Tensor]]:
    """q and k turned, and turned back by backward."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 6, heads, 32, generator=generator).bfloat16() for heads in (2, 1))
    angles = torch.rand(6, 16, generator=generator).repeat(1, 2)
    ours = [t.to(device_type).requires_grad_() for t in (q, k)]
    cos, sin = (turned[None].to(device_type) for turned in (angles.cos(), angles.sin()))
    out = torch.ops.nki_moe.rope_nki(*ours, cos, sin, False)
    back = torch.autograd.grad(out, ours, [t.detach() for t in out])
    turned = [rotate(t, angles.cos()[None], angles.sin()[None]) for t in (q, k)]
    return dict(zip(("q", "k", "dq", "dk"), zip((*out, *back), (*turned, q, k), strict=True), strict=True))


def _versions() -> str:
    return ", ".join(f"{name} {_version(name)}" for name in ("nki", "torch-neuronx", "neuronx-cc"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
