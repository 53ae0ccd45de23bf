"""Contract: the reference losses are the textbook ones, computed by hand on a three-letter language."""

import math

import numpy as np
import pytest
from titan_recipes.publish.baselines import bigram_cross_entropy, unigram_cross_entropy

TRAIN = [np.array([0, 1, 1, 2])]  # targets 1, 1, 2
VALIDATION = [np.array([0, 1, 2])]  # targets 1, 2


def test_add_one_unigram_by_hand():
    p1, p2 = 3 / 6, 2 / 6
    assert unigram_cross_entropy(TRAIN, VALIDATION, 3) == pytest.approx(-(math.log(p1) + math.log(p2)) / 2)


def test_witten_bell_bigram_by_hand():
    # after 0: one follower (1, once); after 1: two followers (1 and 2, once each)
    p01 = (1 + 1 * 3 / 6) / (1 + 1)
    p12 = (1 + 2 * 2 / 6) / (2 + 2)
    assert bigram_cross_entropy(TRAIN, VALIDATION, 3) == pytest.approx(-(math.log(p01) + math.log(p12)) / 2)


def test_a_context_never_seen_falls_back_to_the_unigram():
    validation = [np.array([2, 1])]
    assert bigram_cross_entropy(TRAIN, validation, 3) == pytest.approx(-math.log(3 / 6))
