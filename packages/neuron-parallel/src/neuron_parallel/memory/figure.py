"""The moments of a step as stacked bars against a core's memory (needs matplotlib: the `figure` extra)."""

from pathlib import Path

from neuron_parallel.files import whole_file
from neuron_parallel.memory.snapshot import PARTS, Memory

__all__ = ["draw_memory"]

_GIB = 1 << 30
_BARS = 12


def draw_memory(report: Memory, path: Path, limit: float, title: str, allowance: float = 0.0) -> None:
    """Write a PNG of the largest moments, in order of time.

    Args:
        report: the moments of a step.
        path: the file to write.
        limit: bytes of a core.
        allowance: bytes of the core that tensors cannot have.
        title: the heading.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    largest = sorted(range(len(report.moments)), key=lambda i: -report.moments[i].bytes)[:_BARS]
    moments = [report.moments[i] for i in sorted(largest)]
    figure = Figure(figsize=(10, 0.45 * len(moments) + 1.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left = [0.0] * len(moments)
    colours = [f"C{i}" for i in range(9)] + ["0.6", "0.3"]
    for part, colour in zip(PARTS, colours, strict=True):
        widths = [moment.by_part()[part] / _GIB for moment in moments]
        if any(widths):
            axes.barh(range(len(moments)), widths, left=left, label=part, color=colour)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(limit / _GIB, color="black", label=f"core: {limit / _GIB:.0f} GiB")
    if allowance:
        axes.axvline((limit - allowance) / _GIB, color="black", linestyle=":", label="less runtime and compiler")
    axes.set_yticks(range(len(moments)), [moment.where for moment in moments], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of one logical core (modelled)")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
