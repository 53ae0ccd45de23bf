"""Contract: packing loses no label, crosses no document, keeps one shape, and any rank count sees the same samples
once.
"""

import itertools

import numpy as np
import pytest
from titan_recipes.data.packing import IGNORE_INDEX, Documents, SplitDocuments, WholeDocuments
from titan_recipes.data.tokens import TokenStore

# Documents that one can check by eye: document d holds d*100, d*100+1, ...
DOCUMENTS = [np.arange(100 * d, 100 * d + n, dtype=np.int32) for d, n in ((1, 5), (2, 3), (3, 12), (4, 2), (5, 2))]


def store(documents, learned=None):
    ends = np.cumsum([len(d) for d in documents])
    marks = None if learned is None else np.concatenate(learned)
    return TokenStore(np.concatenate(documents), marks, ends, np.arange(len(ends), dtype=np.uint64), "", "")


def all_of(*stores):
    return Documents([(s, np.arange(len(s))) for s in stores])


def all_samples(packed, epoch=0):
    return [packed.sample(epoch, i) for i in range(packed.samples)]


def pairs_in(samples):
    return sorted((i, t) for s in samples for i, t in zip(s.input_S, s.labels_S, strict=True) if t != IGNORE_INDEX)


ALL_PAIRS = sorted((a, b) for d in DOCUMENTS for a, b in itertools.pairwise(d))


@pytest.mark.parametrize("seq_len", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_pair_appears_once_and_the_target_is_the_next_token_of_the_same_document(seq_len, epoch):
    samples = all_samples(SplitDocuments(all_of(store(DOCUMENTS)), seq_len, shuffle=True), epoch)
    assert pairs_in(samples) == ALL_PAIRS
    assert {len(x) for s in samples for x in (s.input_S, s.positions_S, s.labels_S)} == {seq_len}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("epoch", [0, 1])
def test_whole_documents_appear_once_each_and_are_never_cut(together, epoch):
    packed = WholeDocuments(all_of(store(DOCUMENTS)), 11, together=together, shuffle=True)
    samples = all_samples(packed, epoch)
    assert packed.dropped == 0 and pairs_in(samples) == ALL_PAIRS
    for sample in samples:
        starts = np.flatnonzero(sample.positions_S == 0)
        assert np.array_equal(sample.positions_S, np.concatenate([np.arange(n) for n in np.diff([*starts, 11])]))
        # A document's first token and its positions' zero are at the same places.
        firsts = [p for p in starts if sample.labels_S[p] != IGNORE_INDEX]
        assert all(sample.input_S[p] % 100 == 0 for p in firsts)
    assert len(samples) == (2 if together else 5)  # 11 and 4 + 2 + 1 + 1 pairs


def test_documents_longer_than_a_sample_are_left_out_and_counted():
    packed = WholeDocuments(all_of(store(DOCUMENTS)), 10, together=True, shuffle=False)
    assert packed.dropped == 1
    assert pairs_in(all_samples(packed)) == [(a, b) for a, b in ALL_PAIRS if not 300 <= a < 400]


def test_packing_fills_samples_well():
    rng = np.random.default_rng(0)
    documents = [np.arange(n, dtype=np.int32) for n in rng.integers(2, 400, 2000)]
    packed = WholeDocuments(all_of(store(documents)), 512, together=True, shuffle=True)
    pairs = sum(len(d) - 1 for d in documents)
    assert packed.samples <= 1.02 * pairs / 512 + 1
    assert len(pairs_in(all_samples(packed))) == pairs


def test_labels_of_tokens_that_are_not_learned_are_ignored():
    documents = [np.arange(10, 16, dtype=np.int32), np.arange(20, 23, dtype=np.int32)]
    learned = [np.array([0, 0, 1, 1, 0, 1], bool), np.array([0, 1, 1], bool)]
    documents = all_of(store(documents, learned))
    expected = [(11, 12), (12, 13), (14, 15), (20, 21), (21, 22)]
    for packed in (
        SplitDocuments(documents, 3, shuffle=False),
        WholeDocuments(documents, 7, together=True, shuffle=False),
        WholeDocuments(documents, 7, together=False, shuffle=False),
    ):
        assert pairs_in(all_samples(packed)) == expected


def test_documents_of_several_stores_are_one_sequence():
    one, two = store(DOCUMENTS[:2]), store(DOCUMENTS[2:])
    joined, alone = all_of(one, two), all_of(store(DOCUMENTS))
    for a, b in zip(
        all_samples(SplitDocuments(joined, 4, shuffle=True, seed=3), 1),
        all_samples(SplitDocuments(alone, 4, shuffle=True, seed=3), 1),
        strict=True,
    ):
        assert np.array_equal(a.input_S, b.input_S) and np.array_equal(a.labels_S, b.labels_S)


def test_positions_restart_with_each_document_and_with_each_sample():
    packed = SplitDocuments(all_of(store(DOCUMENTS[:3])), 6, shuffle=False)
    first, second, third = all_samples(packed)
    assert first.input_S.tolist() == [100, 101, 102, 103, 200, 201]
    assert first.positions_S.tolist() == [0, 1, 2, 3, 0, 1]
    assert second.positions_S.tolist() == [0, 1, 2, 3, 4, 5]  # one document over two samples restarts
    assert third.labels_S.tolist() == [307, 308, 309, 310, 311, IGNORE_INDEX]


@pytest.mark.parametrize("together", [None, True])
def test_epochs_are_shuffled_differently_but_reproducibly(together):
    def stream(epoch, seed):
        documents = all_of(store(DOCUMENTS))
        packed = (
            SplitDocuments(documents, 4, shuffle=True, seed=seed)
            if together is None
            else WholeDocuments(documents, 11, together=False, shuffle=True, seed=seed)
        )
        return np.concatenate([s.input_S for s in all_samples(packed, epoch)]).tolist()

    assert stream(0, 0) == stream(0, 0)
    assert len({tuple(stream(epoch, 0)) for epoch in range(4)}) > 1


def test_an_index_outside_the_epoch_is_refused():
    packed = SplitDocuments(all_of(store(DOCUMENTS)), 4, shuffle=False)
    with pytest.raises(IndexError):
        packed.sample(0, packed.samples)


def test_a_position_without_a_label_is_marked_as_the_losses_expect():
    import inspect

    import torch
    from qwen3_core.loss import IGNORE
    from titan_recipes.data.packing import IGNORE_INDEX

    default = inspect.signature(torch.nn.functional.cross_entropy).parameters["ignore_index"].default
    assert IGNORE_INDEX == IGNORE == default
