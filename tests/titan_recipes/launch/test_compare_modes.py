"""Contract: two modes that part are told with the step."""

import math

from titan_recipes.launch.compare_modes import Step, table


def test_modes_that_part_are_told_with_the_step():
    eager = [Step(1, 7.0, 1.0), Step(2, 6.5, 0.2), Step(3, 6.0, 0.2)]
    compiled = [Step(1, 7.0, 9.0), Step(2, 6.5, 0.1), Step(3, 6.1, 0.1)]
    lines = table(eager, compiled, 1e-2)
    assert lines[-1].startswith("they part at step 3")
    assert "(2.00x)" in lines[-2]
    assert table(eager, eager, 1e-2)[-1].startswith("together")
    assert table(eager, [*compiled[:2], Step(3, math.nan, 0.1)], 1e-2)[-1].startswith("they part at step 3")
