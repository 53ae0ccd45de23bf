"""Modelled time of a kernel: ideal (the busiest engine or the DMA), serial (their sum), scheduled; as text, Perfetto trace, chart."""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nki_sim.cost import Model
from nki_sim.kernel import Program, specialise
from nki_sim.memory import CAPACITY, Usage
from nki_sim.schedule import Event, Recorder, schedule
from nki_sim.tensor import MemoryRegion

__all__ = ["CoreReport", "Report", "report"]

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")


@dataclass
class CoreReport:
    """One core: busy nanoseconds by engine, the Tensor Engine's split, and DMA traffic."""

    busy_ns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENGINES, 0.0))
    useful_ns: float = 0.0
    transpose_ns: float = 0.0
    dma_bytes: Counter[str] = field(default_factory=Counter)
    descriptors: Counter[int] = field(
        default_factory=Counter
    )  # size in bytes, rounded down to a power of two -> how many
    instructions: Counter[str] = field(default_factory=Counter)

    @property
    def padding_ns(self) -> float:
        """Tensor Engine time that is neither transposition nor asked-for arithmetic at full rate."""
        return self.busy_ns["tensor"] - self.useful_ns - self.transpose_ns

    @property
    def ideal_ns(self) -> float:
        return max(self.busy_ns.values())

    @property
    def serial_ns(self) -> float:
        return sum(self.busy_ns.values())

    def add(self, event: Event) -> None:
        cost = event.cost
        self.busy_ns[event.instr.engine] += cost.ns
        self.useful_ns += cost.useful_ns
        self.transpose_ns += cost.transpose_ns
        self.instructions[event.instr.op] += 1
        if cost.issue:
            self.busy_ns[cost.issue[0]] += cost.issue[1]
        if cost.bytes:
            self.dma_bytes[cost.direction] += cost.bytes
            self.descriptors[1 << ((cost.bytes // cost.descriptors).bit_length() - 1)] += cost.descriptors


@dataclass
class Report:
    """Modelled, never measured. Times in nanoseconds; two cores count as the slower one."""

    outputs: Any
    program: Program
    model: Model
    cores: list[CoreReport]
    scheduled_ns: float
    events: list[Event]

    @property
    def ideal_ns(self) -> float:
        """Everything overlaps: the busiest engine, or the DMA."""
        return max(core.ideal_ns for core in self.cores)

    @property
    def serial_ns(self) -> float:
        """Nothing overlaps."""
        return max(core.serial_ns for core in self.cores)

    @property
    def usage(self) -> Usage:
        """SBUF and PSUM high-water in bytes per partition."""
        return self.program.usage

    @property
    def useful_pe(self) -> float:
        """Useful Tensor Engine time over scheduled time, of the busier core."""
        return max(core.useful_ns for core in self.cores) / self.scheduled_ns if self.scheduled_ns else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        cores = [
            {
                "busy_ns": core.busy_ns,
                "pe_ns": {"useful": core.useful_ns, "transpose": core.transpose_ns, "padding": core.padding_ns},
                "dma_bytes": dict(core.dma_bytes),
                "descriptors": {str(k): v for k, v in sorted(core.descriptors.items())},
                "instructions": dict(core.instructions),
            }
            for core in self.cores
        ]
        times = {"ideal_ns": self.ideal_ns, "serial_ns": self.serial_ns, "scheduled_ns": self.scheduled_ns}
        memory = {"sbuf_bytes": self.usage.sbuf, "psum_bytes": self.usage.psum}
        return {
            "modelled": True,
            "hash": self.program.hash,
            **times,
            "useful_pe": self.useful_pe,
            **memory,
            "cores": cores,
        }

    def __str__(self) -> str:
        us = "{:10.2f} us".format
        lines = [
            f"modelled (never measured): {self.program.kernel.__name__}, {len(self.cores)} core(s), program {self.program.hash[:12]}",
            f"  ideal {us(self.ideal_ns / 1e3)}   scheduled {us(self.scheduled_ns / 1e3)}   serial {us(self.serial_ns / 1e3)}   useful PE / scheduled {self.useful_pe:.1%}",
            f"  SBUF {self.usage.sbuf} of {CAPACITY[MemoryRegion.sbuf]}, PSUM {self.usage.psum} of {CAPACITY[MemoryRegion.psum]} bytes per partition",
        ]
        for number, core in enumerate(self.cores):
            lines.append(
                f"  core {number}: " + "  ".join(f"{e} {core.busy_ns[e] / 1e3:.2f}" for e in ENGINES) + " us busy"
            )
            pe = core.busy_ns["tensor"] or 1.0
            split = {"useful": core.useful_ns, "transpose": core.transpose_ns, "padding": core.padding_ns}
            lines.append("    PE " + ", ".join(f"{k} {v / pe:.1%}" for k, v in split.items()))
            lines.append("    DMA " + ", ".join(f"{k} {v / 2**20:.3f} MiB" for k, v in sorted(core.dma_bytes.items())))
            lines.append("    descriptors " + ", ".join(f">={k} B: {v}" for k, v in sorted(core.descriptors.items())))
        return "\n".join(lines)

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """A Chrome/Perfetto trace of the schedule (open it at ui.perfetto.dev)."""
        queues = sorted({e.queue for e in self.events})
        names = [
            {"ph": "M", "name": "thread_name", "pid": core, "tid": tid, "args": {"name": queue}}
            for tid, (core, queue) in enumerate(queues)
        ]
        spans = [
            {
                "ph": "X",
                "name": e.instr.op,
                "pid": e.core,
                "tid": queues.index(e.queue),
                "ts": e.start / 1e3,
                "dur": (e.end - e.start) / 1e3,
                "args": {"line": str(e.instr.where), "modelled": True},
            }
            for e in self.events
        ]
        return _write(Path(path), json.dumps({"traceEvents": names + spans, "displayTimeUnit": "ns"}).encode())

    def save_chart(self, path: str | os.PathLike[str], bins: int = 240) -> Path:
        """A PNG of how busy each engine is over the schedule (needs matplotlib: nki-sim[plot])."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise ModuleNotFoundError("drawing needs matplotlib: pip install 'nki-sim[plot]'") from None
        rows = [(core, engine) for core in range(len(self.cores)) for engine in ENGINES]
        width = max(self.scheduled_ns, 1.0) / bins
        busy = [[0.0] * bins for _ in rows]
        for e in self.events:
            row = busy[rows.index((e.core, e.instr.engine))]
            start, end = e.start, e.start + e.cost.ns
            for b in range(int(start / width), min(int(end / width), bins - 1) + 1):
                row[b] += max(0.0, min(end, (b + 1) * width) - max(start, b * width)) / width
        figure = Figure(figsize=(10, 0.6 + 0.35 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(
            busy, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=(0, self.scheduled_ns / 1e3, len(rows), 0)
        )
        axes.set_yticks([i + 0.5 for i in range(len(rows))], [f"core {c} {e}" for c, e in rows])
        axes.set_xlabel("us, modelled")
        axes.set_title(f"{self.program.kernel.__name__}: engine occupancy, modelled")
        path = Path(path)
        scratch = path.with_name(path.name + ".tmp")
        FigureCanvasAgg(figure).print_png(str(scratch))
        scratch.replace(path)
        return path


def report(kernel: Any, *args: Any, model: Model | None = None, **kwargs: Any) -> Report:
    """Run a kernel (or a traced Program) and model its time: print it, save_trace(path), save_chart(path)."""
    model = model or Model()
    program = kernel if isinstance(kernel, Program) else specialise(kernel, args, kwargs)
    recorder = Recorder(model, program.written)
    run = program.execute(args, kwargs, observe=recorder)
    total = schedule(recorder.events, model)
    cores = [CoreReport() for _ in program.cores]
    for event in recorder.events:
        cores[event.core].add(event)
    return Report(run.outputs, program, model, cores, total, recorder.events)


def _write(path: Path, content: bytes) -> Path:
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(content)
    scratch.replace(path)
    return path
