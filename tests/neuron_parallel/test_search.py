"""Contract: what is suggested is valid, fits and is ranked by its estimate; a fixed degree stays; nothing that fits is
named as such.
"""

import random
import statistics
from dataclasses import replace

import pytest
from neuron_parallel import Cluster, ParallelPlan, core_memory, errors, instance, suggest
from neuron_parallel.memory import device_allowance, least_bytes, peak_bytes
from neuron_parallel.plan import Training
from plan_shapes import QWEN3_4B, QWEN3_8B, QWEN3_30B, QWEN3_235B, TRN2


@pytest.mark.parametrize("shape", [QWEN3_4B, QWEN3_8B, QWEN3_30B], ids=["4B", "8B", "30B-A3B"])
def test_suggestions_are_valid_fit_and_are_in_order(shape):
    found = suggest(shape, TRN2)
    assert found.choices and found.cut is None
    for tight in (False, True):
        speeds = [choice.time.tokens_per_second for choice in found.choices if choice.tight == tight]
        assert speeds == sorted(speeds, reverse=True)
    for choice in found.choices:
        assert choice.plan.world == 64 and choice.reason
        assert not errors(choice.plan, shape, TRN2, choice.training)
        assert choice.memory.peak.bytes + device_allowance(TRN2) <= TRN2.hbm_bytes
    assert len({str(choice.plan) for choice in found.choices}) == len(found.choices)


def test_fixed_degrees_are_held():
    found = suggest(QWEN3_8B, TRN2, fixed={"tp": 4, "pp": 1, "seq_len": 8192, "global_batch": 64})
    assert found.choices
    assert all((c.plan.tp, c.plan.pp, c.plan.seq_len, c.plan.global_batch) == (4, 1, 8192, 64) for c in found.choices)


def test_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match="cannot be held fixed"):
        suggest(QWEN3_8B, TRN2, fixed={"tensor": 4})


def test_when_nothing_fits_the_largest_cut_that_does_is_named():
    small = Cluster(instance("trn2.3xlarge"))
    found = suggest(QWEN3_30B, small, fixed={"cp": 1})
    assert not found.choices and found.cut is not None
    assert 0 < found.cut.layers < 48 and found.cut.needed > small.hbm_bytes
    assert suggest(replace(QWEN3_30B, num_hidden_layers=found.cut.layers), small, fixed={"cp": 1}).choices
    assert not suggest(replace(QWEN3_30B, num_hidden_layers=found.cut.layers + 1), small, fixed={"cp": 1}).choices


def test_the_bound_that_spares_the_exact_figure_is_never_above_it():
    mixed = replace(QWEN3_30B, dense_layers=12)
    draw = random.Random(0)
    close = []
    while len(close) < 150:
        shape = draw.choice((QWEN3_4B, QWEN3_8B, QWEN3_30B, QWEN3_235B, mixed))
        degrees = {"tp": (1, 2, 4), "cp": (1, 2), "pp": (1, 1, 2, 4, 8), "ep": (1, 8, 64), "micro_batch": (1, 2)}
        layout = ParallelPlan(**{name: draw.choice(values) for name, values in degrees.items()}).resolve(64)
        layout = replace(layout, global_batch=layout.global_batch * draw.choice((1, 2, 8)))
        training = Training(
            checkpointing=draw.choice(("none", "selective", "full", "linears")),
            reshard=draw.choice(("default", "always", "never")),
            optimizer=draw.choice(("foreach", "fused")),
            loss_chunks=draw.choice((1, 8)),
            dispatcher=draw.choice(("gather", "capacity", "all-to-all")),
        )
        if not errors(layout, shape, TRN2, training):
            bound, exact = least_bytes(layout, shape, training), core_memory(layout, shape, training).peak.bytes
            assert 0 < bound <= exact == peak_bytes(layout, shape, training), (layout, training)
            close.append(bound / exact)
    assert statistics.median(close) > 0.5  # or it would spare nothing


def test_235b_does_not_fit_one_node_and_does_on_four():
    assert not suggest(QWEN3_235B, TRN2, fixed={"pp": 1, "cp": 1, "dp_replicate": 1, "tp": 4}).choices
    assert suggest(QWEN3_235B, Cluster(instance("trn2.48xlarge"), 4), fixed={"pp": 1}).choices


def test_what_fits_only_within_the_models_error_comes_after_all_that_fits_beyond_it():
    found = suggest(QWEN3_30B, TRN2)
    room = TRN2.hbm_bytes - device_allowance(TRN2)
    tight = [choice.tight for choice in found.choices]
    assert tight == sorted(tight) and 0 < sum(tight) < len(tight)
    assert all((choice.peak * 1.1 > room) == choice.tight for choice in found.choices)
    assert all(("model's error of 10%" in choice.reason) == choice.tight for choice in found.choices)


def test_layouts_are_ranked_as_the_toolkit_runs_them_context_parallel_with_a_mask():
    found = suggest(QWEN3_8B, TRN2).choices
    assert (found[0].plan.tp, found[0].plan.dp_shard, found[0].plan.cp) == (4, 16, 1)  # the recipe's own layout
    assert {choice.plan.cp > 1 for choice in found} == {True, False}
    assert all((choice.training.attention == "masked") == (choice.plan.cp > 1) for choice in found)
