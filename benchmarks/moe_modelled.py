"""The expert kernels' modelled time on Trainium2: utilisation of the matmul engine, against the roofline and AWS's
nki-library.

    python benchmarks/moe_modelled.py                          # about ten minutes, 5 GB; --quick: less than one
    python benchmarks/moe_modelled.py --nki-library CHECKOUT   # beside AWS's kernels, a clone of aws-neuron/nki-library

Claim: at Qwen3-30B's layer (D 2048, F 768) the kernels keep the matmul engine busy, counts being run-time data. Nothing
here is measured: nki-sim runs the kernels and adds up documented costs (nki_sim.cost). Utilisation is useful work, 2 R
D F x 3 (forward) or 6 (backward) with real rows only, over the time of both cores' peak. `ideal` takes the busiest of
engines and DMA, `scheduled` adds dependencies and latencies, `serial` overlaps nothing. The roofline is the larger of
useful work at peak and the bytes no implementation can avoid (rows, weights or their gradients, what forward keeps) at
the DMA's peak. `by index` are the bytes and descriptors of gathers and scatters: of the tokens' rows and the combine
where the edges are fused (top-8), of tail tiles where they are not.

AWS's kernels (shard on intermediate; backward dropless) are run as they are, on the same simulator in the same run, at
the block size that suits them best. They gather rows and scale by affinities, as ours do when fused; both variants of
ours are printed beside.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

D, F = 2048, 768
TOP_K = 8
PEAK_FLOPS = 128 * 128 * 2 * 2.4e9  # of one physical core, bfloat16
DMA_BYTES = 16 * 23e9  # per second and core
GOALS = {  # (rows, experts, routing): forward, backward, scheduled
    (16384, 16, "multinomial"): (0.85, 0.82),
    (32768, 128, "multinomial"): (0.70, 0.66),
    (16384, 16, "fused"): (0.80, 0.78),
}
PESSIMISTIC: dict[str, dict[str, float | bool]] = {  # assumptions that no document gives a figure for, or a range
    "a descriptor of an indexed DMA costs GpSimd 10 ns (0)": {"swdge_ns": 10},
    "a descriptor costs DMA 120 ns (60)": {"descriptor_ns": 120},
    "DMA starts after 2.6 us (1.3)": {"dma_latency_ns": 2600},
    "a device loop costs 70 us (35)": {"loop_ns": 70_000},
    "engines keep program order (64 instructions ahead)": {"reorder": 1},
    "a stationary tile takes 128 cycles to load (64)": {"weight_cycles": 128},
    "no fast modes of the Vector Engine": {"vector_modes": False},
}
CASES = [  # rows, experts, routing, LNC
    (16384, 16, "multinomial", 2),
    (16384, 16, "even", 2),
    (32768, 128, "multinomial", 2),
    (32768, 128, "even", 2),
    (4096, 128, "multinomial", 2),
    (2048, 4, "multinomial", 2),
    (16384, 16, "fused", 2),
    (32768, 128, "fused", 2),
    (16384, 16, "multinomial", 1),
    (32768, 128, "multinomial", 1),
    (16384, 16, "fused", 1),
    (1024, 128, "multinomial", 2),
]
AGAINST = [(2048, 4, "multinomial", 2), (2048, 4, "fused", 2), *CASES[:1], CASES[6]]
HEAD = (
    f"{'rows':>6} {'experts':>7} {'routing':11} {'LNC':>3} {'':8} {'ideal':>6} {'sched.':>6} {'serial':>6} "
    f"{'goal':>5} {'of roofline':>11} {'us':>8}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small shape only")
    parser.add_argument("--sensitivity", action="store_true", help="each assumption made pessimistic alone, then all")
    parser.add_argument("--nki-library", type=Path, metavar="CHECKOUT", help="run AWS's kernels from here beside")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/moe_modelled.json"))
    parser.add_argument("--plot", type=Path, default=Path("outputs/benchmarks/moe_roofline.png"))
    options = parser.parse_args()
    os.environ["NKI_MOE_BACKEND"] = "sim"
    if options.sensitivity:
        sensitivity(options.out.with_stem("moe_sensitivity"))
        return

    print("modelled, never measured; utilisation of the matmul engine at ideal, scheduled and serial overlap")
    print(HEAD)
    rows: list[dict[str, Any]] = []
    cases = AGAINST if options.nki_library else CASES
    for case in [(2048, 4, "multinomial", 2)] if options.quick else cases:
        for r in measure(*case):
            print(line(r), flush=True)
            rows.append(r)
    theirs = []
    if options.nki_library:
        ours = {(r["rows"], r["experts"], r["pass"], r["routing"]): r["scheduled_us"] for r in rows}
        for R, E in dict.fromkeys((r["rows"], r["experts"]) for r in rows):
            for block in (256, 512):
                theirs += nki_library(options.nki_library, R, E, block)
                for r in theirs[-2:]:
                    print(line(r), flush=True)
        for R, E in dict.fromkeys((r["rows"], r["experts"]) for r in rows):
            for name in ("forward", "backward"):
                best = min(r["scheduled_us"] for r in theirs if (r["rows"], r["experts"], r["pass"]) == (R, E, name))
                for routing in ("multinomial", "fused"):
                    if (us := ours.get((R, E, name, routing))) is not None:
                        print(
                            f"{R:6} rows, {E} experts, {name}: nki-library takes {best / us:.2f}x as long as ours, "
                            f"{routing}"
                        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    out = options.out.with_stem("moe_against_nki_library") if options.nki_library else options.out
    partial = out.with_suffix(".tmp")
    partial.write_text(json.dumps({"modelled": True, "D": D, "F": F, "rows": rows, "nki_library": theirs}, indent=1))
    partial.replace(out)
    if not options.nki_library:
        plot(rows, options.plot)


def sensitivity(out: Path) -> None:
    """Scheduled utilisation at 16384 rows and 16 experts as assumptions change."""
    import nki_sim

    every = {name: value for change in PESSIMISTIC.values() for name, value in change.items()}
    lone = {"dma_engines": nki_sim.Model().lone_dma_engines}
    found = {}
    for name, change in {
        "as assumed": {},
        **PESSIMISTIC,
        "all of these": every,
        "a core alone on its chip": lone,
    }.items():
        rows = measure(*CASES[0], dataclasses.replace(nki_sim.Model(), **change))
        found[name] = {r["pass"]: r["scheduled"] for r in rows}
        print(f"{name:55} " + "  ".join(f"{key} {value:.3f}" for key, value in found[name].items()), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".tmp")
    partial.write_text(json.dumps({"modelled": True, "case": CASES[0], "scheduled": found}, indent=1))
    partial.replace(out)


def line(r: dict[str, Any]) -> str:
    goal = f"{r['goal']:.2f}" if r["goal"] else ""
    return (
        f"{r['rows']:6} {r['experts']:7} {r['routing']:11} {r['lnc']:3} {r['pass']:8} {r['ideal']:6.3f} "
        f"{r['scheduled']:6.3f} {r['serial']:6.3f} {goal:>5} {r['of_roofline']:11.3f} {r['ideal_us']:8.0f}   DMA "
        f"{r['dma_mb']:.0f} MB in {r['descriptors'] / 1e3:.0f} k, "
        f"by index {r['indexed_mb']:.0f} MB in {r['indexed_descriptors'] / 1e3:.0f} k; us busy: {r['bound']}"
    )


def counts_of(R: int, E: int, even: bool = False) -> torch.Tensor:
    """Rows of each expert: even, or each row's expert drawn alike."""
    if even:
        return torch.full((E,), R // E)
    return torch.randint(E, (R,), generator=torch.Generator().manual_seed(0)).bincount(minlength=E)


def problem(R: int, E: int) -> tuple[torch.Tensor, ...]:
    """Rows and w1, w2, w3 whose values nobody looks at: their pages are never touched."""
    shapes = ((R, D), (E, F, D), (E, D, F), (E, F, D))
    return tuple(torch.zeros(s, dtype=torch.bfloat16) for s in shapes)


def measure(R: int, E: int, routing: str, lnc: int, model: Any = None) -> list[dict[str, Any]]:
    """Forward and backward of one shape."""
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(lnc)
    from nki_moe.experts.launch import Own
    from nki_moe.tables import place
    from nki_moe.work import Work

    x, w1, w2, w3 = problem(R, E)
    work = Work(counts_of(R, E, routing == "even"), w1, w2, w3, None, None, None)
    if routing == "fused":
        k = min(TOP_K, E // 2)
        chosen = torch.rand(R // k, E, generator=torch.Generator().manual_seed(0)).topk(k).indices
        placement, counts = place(chosen, E)
        x, work = x[: R // k].contiguous(), Work(counts, w1, w2, w3, *placement, torch.rand(chosen.shape))

    reports: list[Any] = []

    def run(kernel: Any, cores: int, *tensors: torch.Tensor, **constants: Any) -> Any:
        reports.append(modelled(kernel[cores], tensors, constants, model))
        return reports[-1].__dict__.pop("outputs")

    _, *kept = Own(run).forward(x, work, True)
    Own(run).backward(x, x, work, *kept, True)
    parts = {"forward": reports[:1], "backward": reports[1:]}
    return [summary(R, E, routing, lnc, name, part, x.shape[0]) for name, part in parts.items()]


def modelled(
    kernel: Any, tensors: tuple[Any, ...] | dict[str, Any], constants: dict[str, Any], model: Any = None
) -> Any:
    """A kernel's report, its arithmetic left out; events replaced by bytes and descriptors of what moves by index."""
    import nki_sim

    program = nki_sim.trace(kernel, tensors, **constants)
    leave_out_arithmetic(program)
    args, named = ((), tensors) if isinstance(tensors, dict) else (tensors, {})
    with nki_sim.checks(record=("unwritten-output", "uninitialized")):
        report = nki_sim.report(program, *args, model=model, **named, **constants)
    indexed = [e.cost for e in report.events if any(v.by_row for v in (*e.instr.reads, *e.instr.writes))]
    report.indexed = (sum(c.bytes for c in indexed), sum(c.descriptors for c in indexed))
    report.events = []
    return report


def summary(R: int, E: int, routing: str, lnc: int, name: str, part: list[Any], tokens: int) -> dict[str, Any]:
    """A line of the table: one pass, of one kernel or two."""
    weights, row, kept = 3 * E * D * F * 2, tokens * D * 2, R * F * 2
    flops, moved = {
        "forward": (6 * R * D * F, weights + 2 * row + 2 * kept),
        "backward": (12 * R * D * F, 2 * weights + 3 * row + 2 * kept),
    }[name]
    compute, memory = flops / (lnc * PEAK_FLOPS), moved / (lnc * DMA_BYTES)
    ideal, scheduled, serial = (
        sum(getattr(r, k) for r in part) / 1e9 for k in ("ideal_ns", "scheduled_ns", "serial_ns")
    )
    goals = GOALS.get((R, E, routing))
    cores = [core for r in part for core in r.cores]
    return {
        "rows": R,
        "experts": E,
        "routing": routing,
        "lnc": lnc,
        "pass": name,
        "ideal": compute / ideal,
        "scheduled": compute / scheduled,
        "serial": compute / serial,
        "goal": goals[name == "backward"] if goals and lnc == 2 else None,
        "of_roofline": max(compute, memory) / ideal,
        "ideal_us": ideal * 1e6,
        "scheduled_us": scheduled * 1e6,
        "intensity": flops / moved,
        "dma_mb": sum(sum(core.dma_bytes.values()) for core in cores) / 1e6,
        "descriptors": sum(sum(core.descriptors.values()) for core in cores),
        "indexed_mb": sum(r.indexed[0] for r in part) / 1e6,
        "indexed_descriptors": sum(r.indexed[1] for r in part),
        "bound": ", ".join(_busiest(r) for r in part),
        "reports": [r.to_dict() for r in part],
    }


def nki_library(checkout: Path, R: int, E: int, block: int) -> list[dict[str, Any]]:
    """AWS's forward, which keeps what its backward needs, and backward."""
    from nki_moe.nkilib.layout import blockwise
    from nki_moe.work import Work

    x, w1, w2, w3 = problem(R, E)
    inputs = blockwise(x, Work(counts_of(R, E), w1, w2, w3, None, None, None), block)._asdict() | {"block_size": block}
    with aws(checkout) as (forward, backward, scaling), contextlib.redirect_stdout(io.StringIO()):
        first = modelled(forward, inputs, {"checkpoint_activation": True, "expert_affinities_scaling_mode": scaling})
        _, gate_up, down = first.outputs
        kept = {"gate_up_proj_act_checkpoint_T": gate_up, "down_proj_act_checkpoint": down}
        second = modelled(backward, inputs | kept | {"output_hidden_states_grad": inputs["hidden_states"]}, {})
    parts = {"forward": [first], "backward": [second]}
    return [summary(R, E, f"nkilib B{block}", 2, name, part, R) for name, part in parts.items()]


@contextlib.contextmanager
def aws(checkout: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Its kernels for a pair of cores, nki-sim in the place of `nki`."""
    import nki_sim

    nki_sim.install(compat="0.3")
    sys.path[:0] = [str(checkout), str(checkout / "src")]
    try:
        from nkilib_src.nkilib.core.moe.moe_cte.bwmm_shard_on_I import blockwise_mm_baseline_shard_intermediate
        from nkilib_src.nkilib.core.utils.common_types import ExpertAffinityScaleMode
        from nkilib_src.nkilib.experimental.moe.bwd.blockwise_mm_backward import blockwise_mm_bwd

        forward, backward = (nki_sim.jit(k)[2] for k in (blockwise_mm_baseline_shard_intermediate, blockwise_mm_bwd))
        yield forward, backward, ExpertAffinityScaleMode.POST_SCALE
    finally:
        del sys.path[:2]
        nki_sim.uninstall()


def leave_out_arithmetic(program: Any) -> None:
    """Let only what steers the program run: integers and registers. Costs depend on shapes and trip counts alone, and
    tests check the values; teraflops of numpy would take hours.
    """

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
            at = [r["intensity"] for r in points]
            ideal, scheduled = ([r[k] * PEAK_FLOPS / 1e12 for r in points] for k in ("ideal", "scheduled"))
            label = f"{name}, LNC={lnc}"
            axes.plot(at, ideal, marker, fillstyle=fill, label=label)  # type: ignore[arg-type]
            axes.vlines(at, scheduled, ideal, color=axes.lines[-1].get_color(), linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="useful FLOP per byte that must move",
        ylabel="useful TFLOPS per core, modelled",
    )
    axes.set_title(
        "Experts of Qwen3-30B-A3B, modelled on Trainium2\nmarker: ideal; line: down to scheduled", fontsize=10
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_png(str(partial))
    partial.replace(path)


if __name__ == "__main__":
    main()
