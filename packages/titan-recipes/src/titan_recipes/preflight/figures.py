"""The figures of recipes: cores, modelled memory, tokens a step. Generated data, never typed.

    nox -s figures                     rehearses every recipe at full depth, writes recipes/figures.json and the table

`recipes/figures.json` is the one place where they stand. `apps/train --list` shows them, docs/recipes.md has their
table between two marks, and tests compare both with the recipes.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from ..files import replacing
from ..recipes import FIGURES, Figures, list_recipes, load_recipe, read_figures

__all__ = ["figures_of", "table", "update", "with_table"]

_BEGIN, _END = "<!-- figures: made by `nox -s figures` -->", "<!-- figures end -->"


def figures_of(config: Any, *, device: str) -> Figures:
    """Return the figures of a recipe's config, its memory from a rehearsal at full depth on fake ranks.

    Args:
        config: what the recipe returned; the device's defaults are applied to it.
        device: whose defaults. Memory is rehearsed for neuron alone, because a CPU's belongs to the host.
    """
    from ..config.device_defaults import apply_device_defaults
    from .layout import world_size_of

    apply_device_defaults(config, device)
    world, training = world_size_of(config), config.training
    sequences = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * world
    gib = None
    if device == "neuron":
        from .rehearsal import rehearse

        gib = round(rehearse(config, world_size=world).peak_gib, 1)
    return Figures(
        cores=world,
        memory_gib=gib,
        tokens_per_step=sequences * training.seq_len,
        seq_len=training.seq_len,
        mask=config.model_spec.model.document_mask,
    )


def table(figures: dict[str, Figures]) -> str:
    """Return the figures as a Markdown table, a row a recipe."""
    rows = [
        "| recipe | cores | GiB per core, modelled | tokens per step | sequence | mask |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, f in figures.items():
        memory = "-" if f.memory_gib is None else f"{f.memory_gib:.1f}"
        rows.append(f"| `{name}` | {f.cores} | {memory} | {f.tokens_per_step:,} | {f.seq_len:,} | {f.mask} |")
    return "\n".join(rows)


def with_table(text: str, figures: dict[str, Figures]) -> str:
    """Return a page with the table of `figures` between its two marks. Raises ValueError for a page without them."""
    pattern = re.compile(rf"{re.escape(_BEGIN)}\n.*?{re.escape(_END)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page has no {_BEGIN} ... {_END}; put them where the table belongs")
    return pattern.sub(f"{_BEGIN}\n\n{table(figures)}\n\n{_END}", text)


def update(folder: Path, page: Path, names: list[str]) -> None:
    """Rehearse the recipes `names` of `folder` (all, when empty), and write their figures and the page's table."""
    figures = read_figures(folder)
    found = {recipe.name: recipe for recipe in list_recipes(folder)}
    for name in names or found:
        device = "cpu" if name.startswith("debug") else "neuron"
        figures[name] = figures_of(load_recipe(found[name])(), device=device)
        print(f"{name}: {figures[name]}", flush=True)
    ordered = {name: figures[name] for name in found if name in figures}
    with replacing(folder / FIGURES) as file:
        rows = ",\n".join(f'  "{name}": {json.dumps(f._asdict())}' for name, f in ordered.items())
        file.write_text(f"{{\n{rows}\n}}\n")
    with replacing(page) as file:
        file.write_text(with_table(page.read_text(), ordered))


if __name__ == "__main__":
    from ..device.select import set_device

    set_device("cpu")
    update(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
