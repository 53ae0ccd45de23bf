"""nki-moe's torch path on CPU against TorchTitan's and Transformers' experts: forward + backward of Qwen3-30B-A3B's
layer.

    python benchmarks/moe_cpu.py             # about five minutes and 6 GB
    python benchmarks/moe_cpu.py --rows 512  # quicker

Claim: at least as fast as the fastest of TorchTitan's `_grouped_mm` experts and Transformers' `grouped_mm`,
`batched_mm`, `eager`, with outputs equal and peak memory no higher. All have the same weights and rows, and take turns
in one process. A ratio is peer / ours of one round, quoted as the median with the smallest and largest; a peer whose
first round takes SLOW times as long as ours takes no second, and is marked. Time is CPU time on one thread: it measures
the work, also on a shared machine. Memory is the peak of what torch allocates in one step.

4096 rows in float32, and in bfloat16 where the CPU multiplies it; elsewhere bfloat16 has few rows, as the peers'
matmuls are slower there by an order of magnitude. TorchTitan's experts compute in bfloat16 whatever they get; in
float32 their formula runs without the casts. Rows are sorted and every row has one expert with score 1, so that
Transformers' layer computes the same thing. `batched_mm` copies an expert's weights for every row (19 MB a row) and
takes part with few. `eager` makes a gradient of all experts for each expert (300 GB of traffic with 128) and takes part
with 8 experts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nki_moe
import torch
from torch import Tensor
from torch.profiler import profile
from torchtitan.models.common.moe import GroupedExperts
from transformers.integrations import moe as transformers_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

D, F = 2048, 768
SLOW = 4
PEERS = ("torchtitan _grouped_mm", "transformers grouped_mm", "transformers eager")
Step = Callable[[], dict[str, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, at least 5 (default: 5)")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/moe_cpu.json"))
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error(f"--rounds {options.rounds}: a median of fewer than 5 rounds says little")
    torch.set_num_threads(1)
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    narrow = options.rows if native else 128
    started = time.perf_counter()
    print(
        f"{'dtype':8} {'rows':>5} {'experts':>7} {'peer':24} {'s ours':>7} {'s peer':>7} {'time peer/ours':>20} "
        f"{'MB ours':>8} {'MB peer':>8} {'rel. error':>10}"
    )
    rows: list[dict[str, Any]] = []
    for dtype, count, experts, peers in (
        (torch.float32, options.rows, 128, PEERS[:2]),
        (torch.float32, options.rows, 8, PEERS),
        (torch.bfloat16, narrow, 8, PEERS),
        (torch.float32, 32, 8, ("transformers batched_mm",)),
    ):
        for r in measure(dtype, count, experts, peers, options.rounds):
            ratio = (
                f"{r['ratio']:.2f} ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})"
                if r["rounds"] > 1
                else f"{r['ratio']:.2f} (once)"
            )
            print(
                f"{r['dtype']:8} {count:5} {experts:7} {r['peer']:24} {r['ours_s']:7.2f} {r['peer_s']:7.2f} "
                f"{ratio:>20} {r['ours_peak'] / 1e6:8.0f} {r['peer_peak'] / 1e6:8.0f} {r['error']:10.1e}",
                flush=True,
            )
            rows.append(r)
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_suffix(".tmp")
    content = {"torch": torch.__version__, "native_bf16": native, "seconds": seconds, "rows": rows}
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(options.out)


def measure(dtype: torch.dtype, R: int, E: int, peers: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(R, D, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(R, D, generator=generator).to(dtype)
    chosen = torch.randint(E, (R,), generator=generator).sort().values
    counts = chosen.bincount(minlength=E)
    gate_up, down = (torch.randn(s, generator=generator).mul_(0.02).to(dtype) for s in ((E, 2 * F, D), (E, D, F)))
    w1, w2, w3 = (w.detach().requires_grad_() for w in (gate_up[:, :F], down, gate_up[:, F:]))  # one memory for all

    steps: dict[str, Step] = {"ours": gradients(lambda: nki_moe.grouped_mlp(x, counts, w1, w2, w3), dy, x, w1, w2, w3)}
    for name in peers:
        library, kind = name.split()
        if library == "torchtitan":
            steps[name] = gradients(lambda: torchtitan_forward(x, counts, w1, w2, w3), dy, x, w1, w2, w3)
        else:
            steps[name] = transformers_step(kind, x, dy, chosen, gate_up, down)
    errors, peaks = compare(steps, 1e-2 if dtype == torch.bfloat16 else 1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in list(steps) if i % 2 == 0 else list(reversed(steps)):  # none always follows the same one
            if len(seconds[name]) == 1 and seconds[name][0] > SLOW * seconds["ours"][0]:
                continue
            start = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - start)
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "rows": R,
            "experts": E,
            "peer": name,
            "ours_s": statistics.median(seconds["ours"]),
            "peer_s": statistics.median(seconds[name]),
            "rounds": len(ratios),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "ours_peak": peaks["ours"],
            "peer_peak": peaks[name],
            "error": errors[name],
        }
        for name in peers
        for ratios in [[p / o for p, o in zip(seconds[name], seconds["ours"], strict=False)]]
    ]


def compare(steps: dict[str, Step], tolerance: float) -> tuple[dict[str, float], dict[str, int]]:
    """Each one's relative L2 difference from ours and peak bytes, from a step that is not timed. Of more than eight
    experts, the weight gradients of eight are compared: two gradients of all would double the memory of the
    benchmark.
    """
    expected: dict[str, Tensor] = {}
    errors, peaks = {}, {}
    for name, step in steps.items():
        result, peaks[name] = peak_bytes(step)
        some = {k: v[:: max(1, len(v) // 8)].clone() if v.ndim == 3 else v for k, v in result.items()}
        del result
        expected = expected or some
        errors[name] = max(float((some[k] - v).float().norm() / v.float().norm()) for k, v in expected.items())
        assert errors[name] < tolerance, f"{name} computes something else: relative difference {errors[name]:.1e}"
    return errors, peaks


def torchtitan_forward(x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16:
        layer = GroupedExperts(GroupedExperts.Config(dim=1, hidden_dim=1, num_experts=len(w1)))
        for name, w in (("w1_EFD", w1), ("w2_EDF", w2), ("w3_EFD", w3)):
            del layer._parameters[name]
            setattr(layer, name, w)
        return layer(x, counts)
    offsets = counts.cumsum(0).int()
    gate, up = (torch._grouped_mm(x, w.mT, offs=offsets) for w in (w1, w3))
    return torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.mT, offs=offsets)


def gradients(forward: Callable[[], Tensor], dy: Tensor, *inputs: Tensor) -> Step:
    names = ("dx", "dw1", "dw2", "dw3")

    def step() -> dict[str, Tensor]:
        y = forward()
        return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, inputs, dy), strict=True))}

    return step


def transformers_step(name: str, x: Tensor, dy: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Step:
    """One step of Transformers' experts; gate and up are one parameter there."""
    E = len(down)
    config = SimpleNamespace(
        num_experts=E,
        num_local_experts=E,
        hidden_size=D,
        moe_intermediate_size=F,
        hidden_act="silu",
        _experts_implementation=name,
    )
    with torch.device("meta"):
        layer = Qwen3MoeExperts(config)
    layer.gate_up_proj, layer.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
    index, weight = chosen[:, None], torch.ones(len(chosen), 1, dtype=x.dtype)
    functions = {"grouped_mm": "grouped_mm_experts_forward", "batched_mm": "batched_mm_experts_forward"}

    def forward() -> Tensor:
        if name == "eager":
            return (
                type(layer).forward.__wrapped__(layer, x, index, weight)
                if hasattr(type(layer).forward, "__wrapped__")
                else layer(x, index, weight)
            )
        return getattr(transformers_moe, functions[name])(layer, x, index, weight)

    def step() -> dict[str, Tensor]:
        y = forward()
        dx, dgu, dw2 = torch.autograd.grad(y, (x, layer.gate_up_proj, layer.down_proj), dy)
        dw1, dw3 = dgu.chunk(2, dim=1)
        return {"y": y.detach(), "dx": dx, "dw1": dw1, "dw2": dw2, "dw3": dw3}

    return step


def peak_bytes(step: Step) -> tuple[dict[str, Tensor], int]:
    """What a step returns, and the largest sum of its live allocations."""
    with profile(profile_memory=True) as recorded:
        result = step()
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return result, peak


if __name__ == "__main__":
    main()
