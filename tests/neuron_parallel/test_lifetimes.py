"""Contract: as many tensors of a kind live as units have reached their birth and not their death."""

from itertools import product

import pytest
from neuron_parallel.memory.clock import Instant, Phase
from neuron_parallel.memory.lifetimes import EMBEDDING, HEAD, Case, lifetimes

LAYERS = 5
UNITS = ((EMBEDDING, 1), ("layers", LAYERS), (HEAD, 1))
CHAIN = (EMBEDDING, "layers", HEAD)
PLAIN = Case(
    UNITS, tied=False, piped=False, later=False, left=False, stays=False, ahead=False, chunked=False, resharded=False,
    held=False, held_sums=False,
)  # fmt: skip


def alive(case, phase, unit, passed=0):
    """(name, per) -> how many live."""
    table = lifetimes(case)
    found = {}
    for number, count in table.alive(Instant(phase, unit, passed, CHAIN)):
        row = table.rows[number]
        found[row.name, row.per] = found.get((row.name, row.per), 0) + count
    return found


@pytest.mark.parametrize("passed", range(LAYERS))
def test_activations_live_from_a_layers_forward_pass_to_its_backward_pass(passed):
    assert alive(PLAIN, Phase.FORWARD, "layers", passed).get(("activations", "layers"), 0) == passed
    assert alive(PLAIN, Phase.LOSS, HEAD)["activations", "layers"] == LAYERS
    left = alive(PLAIN, Phase.BACKWARD, "layers", passed).get(("activations", "layers"), 0)
    assert left == LAYERS - 1 - passed


@pytest.mark.parametrize("passed", range(LAYERS))
def test_one_layer_is_gathered_unless_parameters_stay(passed):
    gathered = ("gathered parameters", "layers")
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert alive(PLAIN, phase, "layers", passed)[gathered] == 1
    stays = PLAIN._replace(stays=True)
    assert alive(stays, Phase.FORWARD, "layers", passed)[gathered] == passed + 1
    assert alive(stays, Phase.BACKWARD, "layers", passed)[gathered] == LAYERS - passed
    piped = stays._replace(piped=True)
    assert alive(piped, Phase.BACKWARD, "layers", passed)[gathered] == LAYERS
    assert alive(piped, Phase.SUM, "layers", passed).get(gathered, 0) == LAYERS - 1 - passed


@pytest.mark.parametrize("passed", range(LAYERS))
def test_gradients_come_with_reductions_unless_an_earlier_micro_batch_left_them(passed):
    gradients = ("gradients", "layers")
    assert alive(PLAIN, Phase.REDUCE, "layers", passed).get(gradients, 0) == passed
    assert alive(PLAIN._replace(later=True), Phase.REDUCE, "layers", passed)[gradients] == LAYERS
    assert gradients not in alive(PLAIN, Phase.LOSS, HEAD)


@pytest.mark.parametrize("passed", range(LAYERS))
def test_one_reduce_scatter_is_in_flight_and_one_layer_is_prefetched(passed):
    now = alive(PLAIN, Phase.BACKWARD, "layers", passed)
    in_flight = [now.get(("reduce-scatter input in flight", unit), 0) for unit in ("layers", HEAD)]
    assert in_flight == ([1, 0] if passed else [0, 1])
    prefetched = [now.get(("prefetched flat output", unit), 0) for unit in (EMBEDDING, "layers")]
    assert prefetched == ([1, 0] if passed == LAYERS - 1 else [0, 1])


def test_in_the_optimizer_state_gradients_and_tables_are_left_whatever_the_case():
    flags = [(False, True)] * (len(Case._fields) - 1)
    for values in product(*flags):
        table = lifetimes(Case(UNITS, *values))
        left = {table.rows[number].name for number, _ in table.alive(Instant(Phase.OPTIMIZER, EMBEDDING, 0, CHAIN))}
        assert left == {"parameters", "moments", "gradients", "rope tables, expert counts"}, values


def test_rows_of_fsdp_and_pipelines_name_the_code_that_decides_them():
    own = {"rope tables, expert counts", "inputs, buffers between stages", "kept beside the layers", "parameters",
           "moments", "activations of other micro-batches in flight", "activations",
           "kept by final norm and head"}  # fmt: skip
    for values in product(*[(False, True)] * (len(Case._fields) - 1)):
        for row in lifetimes(Case(UNITS, *values)).rows:
            assert bool(row.source) == (row.name not in own), row
