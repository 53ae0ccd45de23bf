"""The expert kernels' modelled time on Trainium2: utilisation of the matmul engine, against the roofline.

    python benchmarks/moe_modelled.py                  # some minutes; --quick: two shapes

Claim: at Qwen3-30B's layer (D 2048, F 768) the kernels keep the matmul engine busy, counts being run-time data. Nothing here
is measured: nki-sim runs the kernels and adds up documented costs (nki_sim.cost). Utilisation is useful work, 2 R D F x
3 (forward) or 6 (backward) with real rows only, over the time of both cores' peak. `ideal` takes the busiest of engines and DMA, `scheduled` adds
dependencies and latencies, `serial` overlaps nothing. The roofline is the larger of useful work at peak and the bytes no
implementation can avoid (rows, weights or their gradients, what forward keeps) at the DMA's peak.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

D, F = 2048, 768
PEAK_FLOPS = 128 * 128 * 2 * 2.4e9  # of one physical core, bfloat16
DMA_BYTES = 16 * 23e9  # per second and core
GOALS = {  # (rows, experts, even): forward, backward
    (16384, 16, False): (0.88, 0.82),
    (32768, 128, False): (0.72, 0.65),
    (16384, 16, True): (0.93, 0.88),
    (32768, 128, True): (0.93, 0.88),
}
SHAPES = [
    (16384, 16, False),
    (16384, 16, True),
    (32768, 128, False),
    (32768, 128, True),
    (4096, 128, False),
    (2048, 4, False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest and the first shape only")
    parser.add_argument("--lnc", type=int, choices=(1, 2), action="append", help="default: both")
    parser.add_argument("--fused", action="store_true", help="with the gather and the combine in the kernels (top-8)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/moe_modelled.json"))
    parser.add_argument("--plot", type=Path, default=Path("outputs/benchmarks/moe_roofline.png"))
    options = parser.parse_args()
    os.environ["NKI_MOE_BACKEND"] = "sim"

    print("modelled, never measured; utilisation of the matmul engine at ideal (scheduled, serial) overlap")
    print(
        f"{'rows':>6} {'experts':>7} {'routing':11} {'LNC':>3} {'':8} {'ideal':>6} {'sched.':>6} {'serial':>6} {'goal':>5} {'of roofline':>11} {'us':>8}"
    )
    rows: list[dict[str, Any]] = []
    for R, E, even in SHAPES[:1] + SHAPES[-1:] if options.quick else SHAPES:
        for lnc in options.lnc or (2, 1):
            for r in measure(R, E, even, lnc, options.fused):
                goal = f"{r['goal']:.2f}" if r["goal"] else ""
                print(
                    f"{R:6} {E:7} {r['routing']:11} {lnc:3} {r['pass']:8} {r['ideal']:6.3f} {r['scheduled']:6.3f} {r['serial']:6.3f} "
                    f"{goal:>5} {r['of_roofline']:11.3f} {r['ideal_us']:8.0f}   {r['bound']}",
                    flush=True,
                )
                rows.append(r)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_suffix(".tmp")
    partial.write_text(json.dumps({"modelled": True, "D": D, "F": F, "rows": rows}, indent=1))
    partial.replace(options.out)
    plot(rows, options.plot)


def measure(R: int, E: int, even: bool, lnc: int, fused: bool) -> list[dict[str, Any]]:
    """Forward and backward of one shape."""
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(lnc)
    from nki_moe.experts import launch

    generator = torch.Generator().manual_seed(0)
    x, dy = torch.zeros(2, R, D, dtype=torch.bfloat16)  # nobody looks at the values
    w1, w3 = torch.zeros(2, E, F, D, dtype=torch.bfloat16)
    w2 = torch.zeros(E, D, F, dtype=torch.bfloat16)
    order = scores = None
    if fused:
        K = 8
        chosen = torch.rand(R // K, E, generator=generator).topk(K).indices
        counts, order = chosen.flatten().bincount(minlength=E), chosen.flatten().argsort(stable=True)
        x, dy, scores = x[: R // K].contiguous(), dy[: R // K].contiguous(), torch.rand(R // K, K, generator=generator)
    elif even:
        counts = torch.full((E,), R // E)
    else:
        counts = torch.randint(E, (R,), generator=generator).bincount(minlength=E)

    reports: list[Any] = []

    def run(kernel: Any, cores: int, *tensors: torch.Tensor, **constants: Any) -> Any:
        import nki_sim

        program = nki_sim.trace(kernel[cores], tensors, **constants)
        leave_out_arithmetic(program)
        with nki_sim.checks(record=("unwritten-output", "uninitialized")):
            report = nki_sim.report(program, *tensors, **constants)
        outputs, report.outputs, report.events = report.outputs, None, []
        reports.append(report)
        return outputs

    _, saved = launch.forward(x, counts, w1, w2, w3, order, scores, True, run)
    _, _, dgu = launch.backward_data(dy, counts, w1, w2, w3, order, scores, saved, run)
    launch.backward_weights(dy, x, counts, order, scores, saved, dgu, run)

    weights, row, kept = 3 * E * D * F * 2, x.shape[0] * D * 2, R * F * 2
    found = []
    for name, part, flops, moved in (
        ("forward", reports[:1], 6 * R * D * F, weights + 2 * row + 3 * kept),
        ("backward", reports[1:], 12 * R * D * F, 2 * weights + 3 * row + 3 * kept),
    ):
        compute, memory = flops / (lnc * PEAK_FLOPS), moved / (lnc * DMA_BYTES)
        ideal, scheduled, serial = (
            sum(getattr(r, k) for r in part) / 1e9 for k in ("ideal_ns", "scheduled_ns", "serial_ns")
        )
        goals = GOALS.get((R, E, even))
        found.append(
            {
                "rows": R,
                "experts": E,
                "routing": "fused" if fused else "even" if even else "multinomial",
                "lnc": lnc,
                "pass": name,
                "ideal": compute / ideal,
                "scheduled": compute / scheduled,
                "serial": compute / serial,
                "goal": goals[name == "backward"] if goals and lnc == 2 else None,
                "of_roofline": max(compute, memory) / ideal,
                "ideal_us": ideal * 1e6,
                "intensity": flops / moved,
                "bound": ", ".join(_busiest(r) for r in part),
                "reports": [r.to_dict() for r in part],
            }
        )
    return found


def leave_out_arithmetic(program: Any) -> None:
    """Let only what steers the program run: integers and registers. Costs depend on shapes and trip counts alone, and tests
    check the values; teraflops of numpy would take hours."""

    def skim(instr: Any) -> Callable[[Any], None]:
        direct = [v for v in (*instr.reads, *instr.writes) if not v.indirect_index or v.indirect_index.kind == "scalar"]

        def compute(machine: Any) -> None:
            for view in direct:
                machine.locate(view)

        return compute

    for core in program.cores:
        for instr in core.instructions():
            if any(v.dtype not in ("int32", "uint32") for v in instr.writes):
                instr.special, instr.compute = True, skim(instr)


def _busiest(report: Any) -> str:
    busy = max((c.busy_ns for c in report.cores), key=lambda b: max(b.values()))
    return " ".join(f"{engine} {ns / 1e3:.0f}" for engine, ns in busy.items() if ns > 0.3 * max(busy.values()))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Modelled TFLOPS over arithmetic intensity under the roof of one physical core."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    roof = [10 * 1.05**i for i in range(110)]
    axes.plot(roof, [min(PEAK_FLOPS, i * DMA_BYTES) / 1e12 for i in roof], color="0.4", label="roofline of one core")
    for name, marker in (("forward", "o"), ("backward", "s")):
        for lnc, fill in ((2, "full"), (1, "none")):
            points = [r for r in rows if r["pass"] == name and r["lnc"] == lnc]
            if not points:
                continue
            axes.plot(
                [r["intensity"] for r in points],
                [r["ideal"] * PEAK_FLOPS / 1e12 for r in points],
                marker,
                fillstyle=fill,  # type: ignore[arg-type]
                label=f"{name}, LNC={lnc}",
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="useful FLOP per byte that must move",
        ylabel="useful TFLOPS per core, modelled",
    )
    axes.set_title("Expert MLP of Qwen3-30B-A3B on Trainium2, modelled (ideal overlap)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_png(str(partial))
    partial.replace(path)


if __name__ == "__main__":
    main()
