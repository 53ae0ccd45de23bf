"""Contract: which source a sample comes from is a function of its number; weights hold; no source's sample is skipped
or doubled.
"""

import numpy as np
import pytest
from titan_recipes.data.mixture import BLOCK, Mixture
from titan_recipes.data.packing import Sample
from titan_recipes.errors import UserError


class Numbers:
    """A source whose sample says where it is from: (source, epoch, index)."""

    def __init__(self, source, samples):
        self.source, self.samples = source, samples

    def sample(self, epoch, index):
        assert 0 <= index < self.samples
        row = np.array([self.source, epoch, index])
        return Sample(row, row, row)


def mixture(sizes, weights):
    return Mixture([Numbers(k, n) for k, n in enumerate(sizes)], weights, [f"s{k}" for k in range(len(sizes))])


def read(mixed, numbers):
    return [tuple(mixed.sample(n).input_S.tolist()) for n in numbers]


def test_each_source_is_read_in_its_own_order_epoch_after_epoch():
    mixed = mixture([7, 100, 13], [1, 5, 2])
    seen = read(mixed, range(3000))
    for k, size in enumerate([7, 100, 13]):
        own = [(epoch, index) for source, epoch, index in seen if source == k]
        assert own == [divmod(i, size) for i in range(len(own))]


def test_weights_hold_over_any_stretch_not_only_in_the_long_run():
    mixed = mixture([10, 10, 10], [0.7, 0.2, 0.1])
    sources = np.array([mixed.locate(n)[0] for n in range(2 * BLOCK)])
    for k, share in enumerate([0.7, 0.2, 0.1]):
        counts = np.cumsum(sources == k)
        assert counts[BLOCK - 1] == share * BLOCK
        assert np.abs(counts - share * np.arange(1, 2 * BLOCK + 1)).max() <= 2


def test_a_sample_is_the_same_whoever_asks_and_in_whatever_order():
    one, two = mixture([7, 11], [1, 3]), mixture([7, 11], [1, 3])
    numbers = [*range(500), 123_456]
    assert read(one, numbers) == list(reversed(read(two, reversed(numbers))))


@pytest.mark.parametrize("sizes", [[30, 1000], [1000, 10], [5, 5]])
def test_a_pass_ends_where_the_first_source_would_begin_again(sizes):
    mixed = mixture(sizes, [1, 3])
    within, after = read(mixed, range(mixed.length)), read(mixed, [mixed.length])
    assert all(epoch == 0 for _, epoch, _ in within)
    assert after[0][1] == 1 and after[0][2] == 0


def test_one_source_is_read_as_it_is():
    mixed = mixture([5], [0.3])
    assert mixed.length == 5
    assert read(mixed, range(7)) == [(0, *divmod(i, 5)) for i in range(7)]


def test_a_weight_too_small_to_be_read_is_refused():
    with pytest.raises(UserError, match=r"weight 1e-09 of 's1'"):
        mixture([5, 5], [1, 1e-9])
