"""Modelled time of a kernel: ideal (the busiest engine or the DMA), serial (their sum), scheduled; as text, Perfetto trace, chart."""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nki_sim.bands import BANDS, kind_of
from nki_sim.cost import Model, cost
from nki_sim.kernel import Program, specialise
from nki_sim.memory import CAPACITY, Usage
from nki_sim.schedule import Event, Recorder, schedule

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")


@dataclass
class CoreReport:
    """One core: busy nanoseconds by engine, the Tensor Engine's split, DMA bytes by direction, and how many descriptors of
    each size (in bytes, rounded down to a power of two)."""

    busy_ns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENGINES, 0.0))
    pe_ns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("useful", "transpose", "padding"), 0.0))
    dma_bytes: Counter[str] = field(default_factory=Counter)
    descriptors: Counter[int] = field(default_factory=Counter)
    instructions: Counter[str] = field(default_factory=Counter)

    def add(self, event: Event) -> None:
        """Count one event."""
        cost, engine = event.cost, event.instr.engine
        self.busy_ns[engine] += cost.ns
        self.instructions[event.instr.op] += 1
        if engine == "tensor":
            parts = (cost.useful_ns, cost.transpose_ns, cost.ns - cost.useful_ns - cost.transpose_ns)
            self.pe_ns = {k: v + part for (k, v), part in zip(self.pe_ns.items(), parts, strict=True)}
        if cost.issue:
            self.busy_ns[cost.issue[0]] += cost.issue[1]
        if cost.bytes:
            self.dma_bytes[cost.direction] += cost.bytes
            self.descriptors[1 << ((cost.bytes // cost.descriptors).bit_length() - 1)] += cost.descriptors


@dataclass
class Report:
    """Modelled, never measured. Times in nanoseconds; of two cores the slower one counts."""

    outputs: Any
    program: Program
    usage: Usage
    cores: list[CoreReport]
    scheduled_ns: float
    events: list[Event]
    model: Model

    @functools.cached_property
    def lone_ns(self) -> float:
        """scheduled_ns of a core that is alone on its chip, and has more of HBM's bandwidth."""
        alone = replace(self.model, dma_engines=self.model.lone_dma_engines)
        costs = {id(e.instr): cost(e.instr, alone) for e in self.events if e.instr.engine == "dma"}
        events = [replace(e, cost=costs.get(id(e.instr), e.cost), start=0.0, end=0.0) for e in self.events]
        return schedule(events, alone)

    @property
    def kind(self) -> str:
        """The class whose error band holds for the totals: matmul, stream or small."""
        core = max(self.cores, key=lambda c: max(c.busy_ns.values()))
        return kind_of(core.busy_ns, core.dma_bytes.total(), core.descriptors.total())

    @property
    def error(self) -> str:
        """The error band of the totals, in words."""
        loops = " Device loops are in no published timing." if any(c.instructions["loop"] for c in self.cores) else ""
        return f"{self.kind}: {BANDS[self.kind]}.{loops}"

    @property
    def ideal_ns(self) -> float:
        """Everything overlaps: the busiest engine, or the DMA."""
        return max(max(core.busy_ns.values()) for core in self.cores)

    @property
    def serial_ns(self) -> float:
        """Nothing overlaps."""
        return max(sum(core.busy_ns.values()) for core in self.cores)

    @property
    def useful_pe(self) -> float:
        """Useful Tensor Engine time over scheduled time, of the core that has more."""
        return max(core.pe_ns["useful"] for core in self.cores) / (self.scheduled_ns or 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        times = {"ideal_ns": self.ideal_ns, "serial_ns": self.serial_ns, "scheduled_ns": self.scheduled_ns}
        times["lone_ns"] = self.lone_ns
        band = {"class": self.kind, **BANDS[self.kind]._asdict()}
        rest = {"useful_pe": self.useful_pe, "memory": self.usage._asdict(), "cores": [vars(c) for c in self.cores]}
        return {"modelled": True, "hash": self.program.hash, **times, "error": band, **rest}

    def __str__(self) -> str:
        times = f"ideal {self.ideal_ns / 1e3:.2f}, scheduled {self.scheduled_ns / 1e3:.2f}, serial {self.serial_ns / 1e3:.2f} us"
        times += f" on a loaded chip; scheduled {self.lone_ns / 1e3:.2f} us on a core alone"
        of = "; ".join(f"{r.value} {u} of {c} B" for (r, c), u in zip(CAPACITY.items(), self.usage, strict=True))
        lines = [f"{self.program.kernel.__name__}, modelled (never measured), program {self.program.hash[:12]}"]
        lines.append(f"  {self.error}")
        lines.append(f"  {times}; useful PE / scheduled {self.useful_pe:.1%}; per partition {of}")
        for number, core in enumerate(self.cores):
            for title, parts, show in (
                ("us busy", core.busy_ns, lambda v: f"{v / 1e3:.2f}"),
                ("PE", core.pe_ns, lambda v, whole=core.busy_ns["tensor"] or 1: f"{v / whole:.1%}"),
                ("DMA MiB", core.dma_bytes, lambda v: f"{v / 2**20:.3f}"),
                ("descriptors by bytes", dict(sorted(core.descriptors.items())), str),
            ):
                lines.append(f"  core {number} {title}: " + ", ".join(f"{k} {show(v)}" for k, v in parts.items()))
        return "\n".join(lines)

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """A Chrome/Perfetto trace of the schedule (open it at ui.perfetto.dev)."""
        queues = sorted({e.queue for e in self.events})
        rows: list[dict[str, Any]] = []
        for i, (core, name) in enumerate(queues):
            rows.append({"ph": "M", "name": "thread_name", "pid": core, "tid": i, "args": {"name": name}})
        for e in self.events:
            place: dict[str, Any] = {"pid": e.core, "tid": queues.index(e.queue), "args": {"line": str(e.instr.where)}}
            # a transfer holds its ring for its bytes; that data are seen a latency later is said beside it
            times = {"ts": e.start / 1e3, "dur": e.cost.ns / 1e3}
            place["args"]["seen_us"] = e.end / 1e3
            rows.append({"ph": "X", "name": e.instr.op, **place, **times})
        return _whole(path, lambda scratch: scratch.write_text(json.dumps({"traceEvents": rows})))

    def save_chart(self, path: str | os.PathLike[str], bins: int = 240) -> Path:
        """A PNG of how busy each engine is over the schedule (needs matplotlib: nki-sim[plot])."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise ModuleNotFoundError("drawing needs matplotlib: pip install 'nki-sim[plot]'") from None
        rows = [(core, engine) for core in range(len(self.cores)) for engine in ENGINES]
        width = (self.scheduled_ns or 1.0) / bins
        busy = [[0.0] * bins for _ in rows]
        for e in self.events:
            start, end = e.start / width, (e.start + e.cost.ns) / width
            for b in range(int(start), min(int(end), bins - 1) + 1):
                busy[rows.index((e.core, e.instr.engine))][b] += max(0.0, min(end, b + 1) - max(start, b))
        figure = Figure(figsize=(10, 0.8 + 0.35 * len(rows)), layout="constrained")
        axes = figure.add_subplot(title=f"{self.program.kernel.__name__}: occupancy, modelled", xlabel="us, modelled")
        extent = (0, self.scheduled_ns / 1e3, len(rows), 0)
        axes.imshow(busy, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=extent)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], [f"core {c} {e}" for c, e in rows])
        return _whole(path, lambda scratch: FigureCanvasAgg(figure).print_png(str(scratch)))


def report(kernel: Any, *args: Any, model: Model | None = None, **kwargs: Any) -> Report:
    """Run a kernel (or a traced Program) and model its time.

    Args:
        kernel: a kernel, k[2] for two cores, or what trace() gave.
        args, kwargs: its arguments, as for simulate().
        model: other assumptions than Model()'s.

    Returns:
        A Report: print it, save_trace(path), save_chart(path), to_dict().
    """
    model = model or Model()
    program = kernel if isinstance(kernel, Program) else specialise(kernel, args, kwargs)
    recorder = Recorder(model, program.written)
    outputs = program.execute(args, kwargs, observe=recorder).outputs
    cores = [CoreReport() for _ in program.cores]
    for event in recorder.events:
        cores[event.core].add(event)
    return Report(outputs, program, program.usage, cores, schedule(recorder.events, model), recorder.events, model)


def _whole(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> Path:
    """Written to a temporary name, then renamed."""
    scratch = Path(f"{path}.tmp")
    write(scratch)
    return scratch.replace(path)
