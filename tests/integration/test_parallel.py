"""Contract: on each route a layout takes the single process's steps: losses, gradient norms, validation, and the random
weights that they would start from without a checkpoint; ranks clip by one norm, and only the pipeline's last stage
speaks of losses. docs/parallelism.md has the whole table, made by parallel_table.py.

CI takes a sample: each kind of parallelism on each route, dense or sparse, in groups of ranks that train several
layouts.
"""

from pathlib import Path

import pytest

from integration.parallel_runs import ROUTES, Route, alone, layout, make_models, train_layouts
from integration.parallel_table import BOUNDS, compare, measure

STEPS = 2
NATIVE, TRANSFORMERS = (next(route for route in ROUTES if route.name == name) for name in ("native", "transformers"))
SAMPLE = [
    (NATIVE, "dense", ("CP2", "DDP2")),
    (NATIVE, "moe", ("FSDP2xPP2 EP2",)),
    (TRANSFORMERS, "moe", ("CP2 EP2", "PP2 interleaved")),
    (TRANSFORMERS, "dense", ("TP2xPP2",)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:

    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("route", "kind", "layouts"), SAMPLE, ids=lambda value: getattr(value, "name", value))
def test_layouts_take_the_steps_of_a_single_process(
    models: dict[str, Path], tmp_path: Path, route: Route, kind: str, layouts: tuple[str, ...]
) -> None:
    reference = alone(models[kind], route, tmp_path / "alone", STEPS)
    assert reference.losses[-1] < reference.losses[0] - 0.05  # it trains, so there is something to differ in
    ran = train_layouts(models[kind], route, [layout(name) for name in layouts], tmp_path, STEPS)
    for name, ranks in ran.items():
        cell = compare(layout(name), ranks, reference)
        assert not cell.check(BOUNDS[route.bfloat16]), (name, cell)
        assert ranks[0].random_weights in (None, pytest.approx(reference.random_weights, rel=1e-9)), name


@pytest.mark.soak
def test_the_whole_table_is_within_its_bounds(tmp_path: Path) -> None:
    cells, _, wrong = measure(tmp_path)
    assert not wrong, "\n".join(wrong)
    assert len(cells) > 100
