"""What the command line asked for, as plain data that spawned ranks get as it is. No torch."""

from dataclasses import dataclass
from typing import Literal

from ..recipes import Recipe

__all__ = ["OUTPUTS", "Mode", "Options"]

Mode = Literal["eager", "compiled"]
"""One side of --compare-modes."""

OUTPUTS = "outputs"
"""The folder of runs that name no folder of their own."""


@dataclass(frozen=True)
class Options:
    """One run: its recipe, its device, its folder and what changes the recipe."""

    recipe: Recipe
    titan_args: tuple[str, ...]
    """The --section.option flags, as they were typed."""
    device: str
    """Resolved: neuron, cuda or cpu."""
    dump_folder: str
    command: str
    """The command that continues this run, as the user would type it."""
    model: str | None = None
    """The model in the place of the recipe's: a folder, a Hub id or a name."""
    route: str | None = None
    """The route in the place of the recipe's: native, transformers or kernels."""
    profile: bool = False
    """Whether to trace one step."""
    mode: Mode | None = None
    """The side of --compare-modes that this run is, if it is one."""
