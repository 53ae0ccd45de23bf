"""Draw the loss curve of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import replacing

__all__ = ["draw_loss_curve"]

# One hue a role; the references are greys that the labels tell apart.
_TRAIN, _VALIDATION, _REFERENCES = "#7aa6c2", "#0b4f6c", ("#555555", "#999999")


def draw_loss_curve(records: Sequence[Mapping[str, Any]], file: Path, references: Mapping[str, float]) -> Path:
    """Training and validation loss against the step, with the reference losses as labelled lines. Returns `file`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150)
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    axes.plot(*zip(*train, strict=True), color=_TRAIN, linewidth=1.5, label="training")
    if validation:
        axes.plot(
            *zip(*validation, strict=True),
            color=_VALIDATION,
            linewidth=2,
            marker="o",
            markersize=4,
            label="validation",
        )
    for (name, value), color in zip(references.items(), _REFERENCES, strict=False):
        axes.axhline(value, color=color, linewidth=1, linestyle="--")
        axes.annotate(
            f"{name} {value:.2f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color=color,
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    with replacing(file) as temporary:
        figure.savefig(temporary, format="png")
    pyplot.close(figure)
    return file
