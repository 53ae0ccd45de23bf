"""Contract: packing loses no label, crosses no document, keeps one shape, and any rank count sees the same samples once."""

import itertools

import numpy as np
import pytest
from titan_recipes.packing import IGNORE_INDEX, PackedDocuments

# Documents that one can check by eye: document d holds d*100, d*100+1, ...
DOCUMENTS = [np.arange(100 * d, 100 * d + n) for d, n in ((1, 5), (2, 3), (3, 12), (4, 2), (5, 1))]


def all_samples(packed, epoch=0):
    return [packed.sample(epoch, i) for i in range(packed.samples)]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 4, 7, 50])
def test_every_pair_appears_once_and_the_target_is_the_next_token_of_the_same_document(seq_len):
    packed = PackedDocuments(DOCUMENTS, seq_len, shuffle=True)
    samples = all_samples(packed)
    pairs = [(i, t) for s in samples for i, t in zip(s.input_S, s.labels_S, strict=True) if t != IGNORE_INDEX]
    assert sorted(pairs) == sorted((a, b) for d in DOCUMENTS for a, b in itertools.pairwise(d))
    assert {len(s.input_S) for s in samples} == {seq_len}


def test_positions_restart_with_each_document_and_with_each_sample():
    packed = PackedDocuments(DOCUMENTS[:3], 6, shuffle=False)
    first, second, third = all_samples(packed)
    assert first.input_S.tolist() == [100, 101, 102, 103, 200, 201]
    assert first.positions_S.tolist() == [0, 1, 2, 3, 0, 1]
    assert second.positions_S.tolist() == [0, 1, 2, 3, 4, 5]  # one document over two samples restarts
    assert third.labels_S.tolist() == [307, 308, 309, 310, 311, IGNORE_INDEX]


def test_epochs_are_shuffled_differently_but_reproducibly():
    def stream(epoch, seed):
        packed = PackedDocuments(DOCUMENTS, 4, shuffle=True, seed=seed)
        return np.concatenate([s.input_S for s in all_samples(packed, epoch)]).tolist()

    assert stream(0, 0) == stream(0, 0)
    assert len({tuple(stream(epoch, 0)) for epoch in range(4)}) > 1


def test_an_index_outside_the_epoch_is_refused():
    packed = PackedDocuments(DOCUMENTS, 4, shuffle=False)
    with pytest.raises(IndexError):
        packed.sample(0, packed.samples)
