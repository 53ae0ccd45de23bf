"""nki-moe's torch path on CPU against TorchTitan's and Transformers' experts: forward + backward of Qwen3-30B-A3B's layer.

    python benchmarks/moe_cpu.py             # 128 experts, then 8; minutes where the CPU has no bfloat16 matmul
    python benchmarks/moe_cpu.py --rows 512  # quicker

Claim: at least as fast as the fastest of TorchTitan's `_grouped_mm` experts and Transformers' `grouped_mm`, `batched_mm`, `eager`, with
outputs equal and peak memory no higher. All have the same bfloat16 weights and rows, and take turns in one process. A
ratio is peer / ours of one round, quoted as the median with the smallest and largest. Time is CPU time on one thread: it measures
the work, also on a shared machine. Memory is the peak of what torch allocates in one step.

Rows are sorted and every row has one expert with score 1, so that Transformers' layer computes the same thing. `batched_mm` copies an
expert's weights for every row (megabytes a row): it takes part with `--batched-rows` rows in a comparison of its own.
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
Step = Callable[[], dict[str, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, at least 5 (default: 5)")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--experts", type=int, action="append", help="default: 128 and 8")
    parser.add_argument("--batched-rows", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/moe_cpu.json"))
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error(f"--rounds {options.rounds}: a median of fewer than 5 rounds says little")
    torch.set_num_threads(1)
    print(
        f"{'rows':>5} {'experts':>7} {'peer':24} {'s ours':>7} {'s peer':>7} {'time peer/ours':>20} {'MB ours':>8} {'MB peer':>8} {'max rel. error':>14}"
    )
    rows: list[dict[str, Any]] = []
    for experts in options.experts or (128, 8):
        for count, batched in ((options.rows, False), (options.batched_rows, True)):
            for r in measure(count, experts, options.rounds, batched):
                ratio = f"{r['ratio']:.2f} ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})"
                print(
                    f"{count:5} {experts:7} {r['peer']:24} {r['ours_s']:7.2f} {r['peer_s']:7.2f} {ratio:>20} "
                    f"{r['ours_peak'] / 1e6:8.0f} {r['peer_peak'] / 1e6:8.0f} {r['error']:14.1e}",
                    flush=True,
                )
                rows.append(r)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_suffix(".tmp")
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    partial.write_text(
        json.dumps(
            {"torch": torch.__version__, "native_bf16": native, "rounds": options.rounds, "rows": rows}, indent=1
        )
    )
    partial.replace(options.out)


def measure(R: int, E: int, rounds: int, batched: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(R, D, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(R, D, generator=generator).bfloat16()
    chosen = torch.randint(E, (R,), generator=generator).sort().values
    counts = chosen.bincount(minlength=E)
    w1, w2, w3 = (
        (torch.randn(s, generator=generator) * 0.02).bfloat16().requires_grad_()
        for s in ((E, F, D), (E, D, F), (E, F, D))
    )
    steps: dict[str, Step] = {"ours": gradients(lambda: nki_moe.grouped_mlp(x, counts, w1, w2, w3), dy, x, w1, w2, w3)}
    if batched:
        steps["transformers batched_mm"] = transformers_step("batched_mm", x, dy, chosen, w1, w2, w3)
    else:
        titan = GroupedExperts(GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E))
        titan.w1_EFD, titan.w2_EDF, titan.w3_EFD = (torch.nn.Parameter(w.detach()) for w in (w1, w2, w3))
        steps["torchtitan _grouped_mm"] = gradients(
            lambda: titan(x, counts), dy, x, titan.w1_EFD, titan.w2_EDF, titan.w3_EFD
        )
        for name in ("grouped_mm", "eager"):
            steps[f"transformers {name}"] = transformers_step(name, x, dy, chosen, w1, w2, w3)
    found = {}
    expected = None
    for name, step in steps.items():
        result = step()
        expected = expected or result
        found[name] = max(float((result[k] - v).float().norm() / v.float().norm()) for k, v in expected.items())
        assert found[name] < 1e-2, f"{name} computes something else: relative difference {found[name]:.1e}"
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in list(steps) if i % 2 == 0 else list(reversed(steps)):  # none always follows the same one
            start = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - start)
    return [
        {
            "rows": R,
            "experts": E,
            "peer": name,
            "ours_s": statistics.median(seconds["ours"]),
            "peer_s": statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "ours_peak": peaks["ours"],
            "peer_peak": peaks[name],
            "error": found[name],
        }
        for name in steps
        if name != "ours"
        for ratios in [[p / o for p, o in zip(seconds[name], seconds["ours"], strict=True)]]
    ]


def gradients(forward: Callable[[], Tensor], dy: Tensor, *inputs: Tensor) -> Step:
    names = ("dx", "dw1", "dw2", "dw3")

    def step() -> dict[str, Tensor]:
        y = forward()
        return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, inputs, dy), strict=True))}

    return step


def transformers_step(name: str, x: Tensor, dy: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Step:
    """One step of Transformers' experts; gate and up are one parameter there."""
    E = w1.shape[0]
    config = SimpleNamespace(
        num_experts=E,
        num_local_experts=E,
        hidden_size=D,
        moe_intermediate_size=F,
        hidden_act="silu",
        _experts_implementation=name,
    )
    layer = Qwen3MoeExperts(config)
    layer.gate_up_proj = torch.nn.Parameter(torch.cat([w1.detach(), w3.detach()], dim=1))
    layer.down_proj = torch.nn.Parameter(w2.detach())
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


def peak_bytes(step: Step) -> int:
    """The largest sum of live allocations of one step."""
    with profile(profile_memory=True) as recorded:
        step()
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


if __name__ == "__main__":
    main()
