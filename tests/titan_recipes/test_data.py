"""Contract of the loader: constant [B, S], the same global stream for any rank count, exact resume, ranks that end together."""

import numpy as np
import pytest
from titan_recipes.data import TextDataLoader
from titan_recipes.errors import UserError


class Letters:
    """A tokenizer that one can check by eye: a token a character, 0 ends a text."""

    def encode(self, text, *, add_bos, add_eos):
        return [ord(c) for c in text] + [0] * add_eos


TOKENIZER = Letters()
TEXTS = [chr(ord("a") + i) * (3 + 5 * i % 11) + str(i) for i in range(9)]


def documents():
    return TEXTS


def loader(ranks=1, rank=0, batch=2, seq_len=5, **config):
    config = {"documents": documents, "holdout": 0.0, "infinite": False, **config}
    return TextDataLoader.Config(**config).build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=TOKENIZER, seq_len=seq_len, local_batch_size=batch
    )


def rows(batches):
    return [tuple(row) for inputs, _ in batches for row in inputs["input"].tolist()]


def labels(batches):
    flat = np.concatenate([y.numpy().ravel() for _, y in batches])
    return sorted(flat[flat != -100].tolist())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_together_see_what_one_rank_sees(ranks):
    alone = rows(loader(batch=ranks))
    parts = [list(loader(ranks, rank, batch=1)) for rank in range(ranks)]
    together = [row for step in zip(*map(rows, parts), strict=True) for row in step]
    assert together[: len(alone)] == alone


def test_seven_samples_over_two_ranks_end_together_and_lose_no_label():
    texts = [f"{i}bcdefg" for i in range(7)]
    parts = [list(loader(2, rank, batch=1, seq_len=7, documents=lambda: texts)) for rank in range(2)]
    assert [len(part) for part in parts] == [4, 4]
    assert labels(parts[0] + parts[1]) == sorted([ord(c) for t in texts for c in t[1:]] + [0] * 7)
    assert (parts[1][-1][1] == -100).all()


def test_a_packed_run_yields_one_shape_for_a_hundred_steps():
    batches = iter(loader(infinite=True))
    shapes = {
        (tuple(x["input"].shape), tuple(x["positions"].shape), tuple(y.shape))
        for x, y in (next(batches) for _ in range(100))
    }
    assert shapes == {((2, 5), (2, 5), (2, 5))}


def test_resuming_twice_continues_the_unbroken_stream():
    def take(data, n):
        batches = iter(data)
        return rows(next(batches) for _ in range(n))

    unbroken = take(loader(infinite=True), 10)
    data = loader(infinite=True)
    take(data, 3)
    for stop in (3, 4):  # 3 -> 6 -> 10
        state, data = data.state_dict(), loader(infinite=True)
        data.load_state_dict(state)
        seen = take(data, stop)
    assert seen == unbroken[12:]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_resumes_on_any_number_without_losing_or_repeating_a_sample(ranks):
    stream = rows(_first(loader(batch=4, infinite=True), 6))
    before = [loader(2, rank, batch=2, infinite=True) for rank in range(2)]
    for data in before:
        _first(data, 2)
    assert before[0].state_dict() == before[1].state_dict()
    after = [loader(ranks, rank, batch=4 // ranks, infinite=True) for rank in range(ranks)]
    parts = []
    for data in after:
        data.load_state_dict(before[0].state_dict())
        parts.append(_first(data, 2))
    seen = [row for step in zip(*parts, strict=True) for batch in step for row in rows([batch])]
    assert seen == stream[8:16]


def _first(data, n):
    batches = iter(data)
    return [next(batches) for _ in range(n)]


def test_resuming_on_other_data_is_refused_with_the_way_out():
    state = loader().state_dict()
    with pytest.raises(UserError, match="exclude_from_loading dataloader"):
        loader(documents=lambda: [*TEXTS, "new"]).load_state_dict(state)


def test_the_validation_part_is_disjoint_and_read_once():
    train, validation = loader(holdout=0.2), loader(holdout=0.2, split="validation", infinite=True)
    assert validation.infinite is False
    ours = {bytes(d.tobytes()) for d in train.packed.documents}
    theirs = {bytes(d.tobytes()) for d in validation.packed.documents}
    assert theirs and not ours & theirs
    assert len(ours | theirs) == len(TEXTS)
