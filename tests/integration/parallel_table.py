"""Write the tables of docs/parallelism.md: every route in every layout against its single process, and routes against
each other.

    PYTHONPATH=tests uv run python -m integration.parallel_table             up to an hour on two cores
    PYTHONPATH=tests uv run python -m integration.parallel_table --keep F    keep cells in F, and go on from there

Exits with 1, and leaves the page as it is, when a cell is over its bound.
"""

import argparse
import json
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from integration.parallel_runs import (
    KINDS,
    LAYOUTS,
    MAX_NORM,
    ROUTES,
    Layout,
    Ran,
    Route,
    alone,
    make_models,
    train_layouts,
)

__all__ = ["BOUNDS", "Cell", "compare", "measure"]

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- made by tests/integration/parallel_table.py -->", "<!-- end of what is made -->"


@dataclass(frozen=True)
class Bound:
    """What the order of sums explains, at losses between 6 and 8."""

    loss: float
    norm: float
    """Relative."""


BOUNDS = {False: Bound(5e-6, 3e-5), True: Bound(1e-3, 1e-3)}
"""The bounds, by whether the experts compute in bfloat16."""


@dataclass(frozen=True)
class Cell:
    """A layout's steps against the single process's: the largest differences of any step and rank."""

    loss: float
    norm: float
    validation: float

    def check(self, bound: Bound) -> list[str]:
        found = {"loss": self.loss, "validation loss": self.validation}
        wrong = [
            f"{name} differs by {value:.1e}, bound {bound.loss:.0e}"
            for name, value in found.items()
            if not value <= bound.loss
        ]
        return wrong + (
            [f"gradient norm differs by {self.norm:.1e} of it, bound {bound.norm:.0e}"]
            if not self.norm <= bound.norm
            else []
        )

    def __str__(self) -> str:
        return f"{self.loss:.0e} / {self.norm:.0e}"


def compare(layout: Layout, ranks: list[Ran], reference: Ran) -> Cell:
    """AssertionError where ranks that should agree do not."""
    with_loss = [rank for rank in ranks if rank.losses[0] > 0]
    stages = layout.degrees.get("pipeline_parallel", 1)
    assert len(with_loss) == len(ranks) // stages, f"{layout.name}: {len(with_loss)} ranks have a loss"
    assert min(reference.grad_norms) > MAX_NORM, "a step was not clipped"
    for rank in ranks:
        assert rank.grad_norms == ranks[0].grad_norms, f"{layout.name}: ranks clip by different norms"
        assert bool(rank.first_loss) == (rank in with_loss), f"{layout.name}: who speaks of the first loss"
    for rank in with_loss:
        assert (rank.losses, rank.validation) == (with_loss[0].losses, with_loss[0].validation), layout.name
    return differences(with_loss[0], reference)


def differences(one: Ran, other: Ran) -> Cell:
    return Cell(
        loss=max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)),
        norm=max(abs(a / b - 1) for a, b in zip(one.grad_norms, other.grad_norms, strict=True)),
        validation=abs(one.validation - other.validation) if one.validation and other.validation else 0.0,
    )


Cells = dict[tuple[str, str, str], Cell]
"""Cells by kind, route and layout."""


def measure(folder: Path, keep: Path | None = None) -> tuple[Cells, dict[tuple[str, str], Ran], list[str]]:
    """All cells, the single processes by kind and route, and what failed or is over its bound.

    `keep`: see the top of this file.
    """
    models = make_models(folder)
    cells = _kept(keep)
    references: dict[tuple[str, str], Ran] = {}
    wrong: list[str] = []
    for kind in KINDS:
        for route in [route for route in ROUTES if kind in route.kinds]:
            run = folder / f"{kind}-{ROUTES.index(route)}"
            reference = references[kind, route.name] = alone(models[kind], route, run)
            todo = [
                layout
                for layout in LAYOUTS[1:]
                if layout.suits(kind, route) and (kind, route.name, layout.name) not in cells
            ]
            for group in _groups(todo):
                try:
                    ran = train_layouts(models[kind], route, group, run / group[0].name, timeout=1800)
                    found = {(kind, route.name, one.name): compare(one, ran[one.name], reference) for one in group}
                except AssertionError as error:  # of one layout; the others of its group are lost with it
                    wrong.append(f"{kind} {route.name}: {error}")
                    print(wrong[-1], flush=True)
                    continue
                cells |= found
                _keep(keep, cells)
                for key, cell in found.items():
                    print("{:6} {:22} {:24}".format(*key), cell, flush=True)
    for (kind, name, layout), cell in cells.items():
        bound = BOUNDS[next(route for route in ROUTES if route.name == name).bfloat16]
        wrong += [f"{kind} {name} {layout}: {error}" for error in cell.check(bound)]
    for kind, a, b in _pairs():
        cell = differences(references[kind, a.name], references[kind, b.name])
        wrong += [f"{kind} {a.name} and {b.name}: {e}" for e in cell.check(BOUNDS[a.bfloat16 or b.bfloat16])]
    return cells, references, wrong


def _groups(layouts: list[Layout], size: int = 4) -> list[list[Layout]]:
    """Layouts of the same number of ranks, a few at a time: importing TorchTitan costs more than a row."""
    worlds = [[one for one in layouts if one.world == world] for world in sorted({one.world for one in layouts})]
    return [same[i : i + size] for same in worlds for i in range(0, len(same), size)]


def _kept(file: Path | None) -> Cells:
    if file is None or not file.exists():
        return {}
    return {tuple(key.split("|")): Cell(**cell) for key, cell in json.loads(file.read_text()).items()}  # type: ignore[misc]


def _keep(file: Path | None, cells: Cells) -> None:
    if file is not None:
        file.write_text(json.dumps({"|".join(key): asdict(cell) for key, cell in cells.items()}))


def _pairs() -> list[tuple[str, Route, Route]]:
    return [
        (kind, a, b)
        for kind in KINDS
        for i, a in enumerate(ROUTES)
        for b in ROUTES[:i]
        if kind in a.kinds and kind in b.kinds
    ]


def render(cells: Cells, references: dict[tuple[str, str], Ran]) -> str:
    """The tables in Markdown."""
    columns = [(kind, route) for kind in KINDS for route in ROUTES if kind in route.kinds]
    lines = [
        "| layout | ranks | " + " | ".join(f"{kind}, {route.name}" for kind, route in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for layout in LAYOUTS[1:]:
        found = [str(cells.get((kind, route.name, layout.name), "")) for kind, route in columns]
        lines.append(f"| {layout.name} | {layout.world} | " + " | ".join(found) + " |")
    lines.append(
        "| bound | | "
        + " | ".join("{0.loss:.0e} / {0.norm:.0e}".format(BOUNDS[route.bfloat16]) for _, route in columns)
        + " |"
    )
    lines += [
        "",
        "Routes against each other, one process each:",
        "",
        "| | loss / gradient norm | bound |",
        "|---|---|---|",
    ]
    for kind, a, b in _pairs():
        bound = BOUNDS[a.bfloat16 or b.bfloat16]
        cell = differences(references[kind, a.name], references[kind, b.name])
        lines.append(f"| {kind}: {a.name}, {b.name} | {cell} | {bound.loss:.0e} / {bound.norm:.0e} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, metavar="F", help="a JSON file of cells: those in it are not measured again"
    )
    options = parser.parse_args()
    from titan_recipes.device.select import set_device

    set_device("cpu")
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cells, references, wrong = measure(Path(folder), options.keep)
    table = render(cells, references)
    print(table)
    if wrong:
        print("\n".join(["", "over the bound:", *wrong]), file=sys.stderr)
        return 1
    page = PAGE.read_text()
    made = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n\n{table}\n\n{END}", page, flags=re.DOTALL
    )
    assert table in made, f"{PAGE} has no markers"
    temporary = PAGE.with_suffix(".tmp")
    temporary.write_text(made)
    temporary.replace(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
