"""Contract of the loader: constant [B, S], the same global stream for any rank count and any mixture of sources, exact
resume, ranks that end together, a step without labels that is no NaN."""

import json

import numpy as np
import pytest
import torch
from chat_tokenizer import tokenizer as chat_tokenizer
from titan_recipes.data.documents import digest
from titan_recipes.data.loader import Source, TextDataLoader, check_parts, split_documents
from titan_recipes.errors import UserError


class Letters:
    """A tokenizer that one can check by eye: a token a character, 0 ends a text."""

    def encode(self, text, *, add_bos, add_eos):
        return [ord(c) for c in text] + [0] * add_eos


TOKENIZER = Letters()
TEXTS = [chr(ord("a") + i) * (3 + 5 * i % 11) + str(i) for i in range(9)]


def documents():
    return TEXTS


def other_documents():
    return [chr(ord("A") + i) * (4 + 3 * i % 7) + str(i) for i in range(12)]


def more_documents():
    return [f"{i}" + "?!" * (i % 2) for i in range(10, 30)]


DATA = {
    "one": {"documents": documents},
    "joined": {"sources": [Source(documents=documents), Source(documents=other_documents)]},
    "weighted": {
        "sources": [
            Source(documents=documents, weight=0.5),
            Source(documents=other_documents, weight=0.3),
            Source(documents=more_documents, weight=0.2),
        ]
    },
    "whole": {"documents": more_documents, "packing": "whole"},
    "padded": {"documents": more_documents, "packing": "none"},
}
data = pytest.mark.parametrize("data", DATA.values(), ids=DATA)


def loader(ranks=1, rank=0, batch=2, seq_len=5, tokenizer=TOKENIZER, **config):
    config = {"holdout": 0.0, "infinite": False, **config}
    if not config.keys() & {"sources", "dataset_path"}:
        config.setdefault("documents", documents)
    return TextDataLoader.Config(**config).build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, seq_len=seq_len, local_batch_size=batch
    )


def rows(batches):
    return [tuple(row) for inputs, _ in batches for row in inputs["input"].tolist()]


def labels(batches):
    flat = np.concatenate([y.numpy().ravel() for _, y in batches])
    return sorted(flat[flat != -100].tolist())


@data
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_together_see_what_one_rank_sees(ranks, data):
    alone = rows(loader(batch=ranks, **data))
    parts = [list(loader(ranks, rank, batch=1, **data)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    together = [row for step in zip(*map(rows, parts), strict=True) for row in step]
    assert together[: len(alone)] == alone


def test_seven_samples_over_two_ranks_end_together_and_lose_no_label():
    texts = [f"{i}bcdefg" for i in range(7)]
    parts = [list(loader(2, rank, batch=1, seq_len=7, documents=lambda: texts)) for rank in range(2)]
    assert [len(part) for part in parts] == [4, 4]
    assert labels(parts[0] + parts[1]) == sorted([ord(c) for t in texts for c in t[1:]] + [0] * 7)
    assert (parts[1][-1][1] == -100).all()


def test_the_end_is_padded_to_a_whole_step_so_that_no_sample_is_dropped_with_it():
    texts = [f"{i}bcdefg" for i in range(7)]
    plain = list(loader(batch=1, seq_len=7, documents=lambda: texts))
    data = loader(batch=1, seq_len=7, documents=lambda: texts)
    data.batches_per_step = 4
    padded = list(data)
    assert (len(plain), len(padded)) == (7, 8)
    assert labels(padded) == labels(plain)


@data
def test_a_run_yields_one_shape_for_a_hundred_steps_and_through_the_end(data):
    endless = iter(loader(infinite=True, **data))
    batches = [next(endless) for _ in range(100)] + list(loader(**data))
    shapes = {(tuple(x["input"].shape), tuple(x["positions"].shape), tuple(y.shape)) for x, y in batches}
    assert shapes == {((2, 5), (2, 5), (2, 5))}


@data
def test_resuming_twice_continues_the_unbroken_stream(data):
    def take(loaded, n):
        batches = iter(loaded)
        return rows(next(batches) for _ in range(n))

    unbroken = take(loader(infinite=True, **data), 10)
    loaded = loader(infinite=True, **data)
    take(loaded, 3)
    for stop in (3, 4):  # 3 -> 6 -> 10
        state, loaded = loaded.state_dict(), loader(infinite=True, **data)
        loaded.load_state_dict(state)
        seen = take(loaded, stop)
    assert seen == unbroken[12:]


@data
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_resumes_on_any_number_without_losing_or_repeating_a_sample(ranks, data):
    stream = rows(_first(loader(batch=4, infinite=True, **data), 6))
    before = [loader(2, rank, batch=2, infinite=True, **data) for rank in range(2)]
    for loaded in before:
        _first(loaded, 2)
    assert before[0].state_dict() == before[1].state_dict()
    after = [loader(ranks, rank, batch=4 // ranks, infinite=True, **data) for rank in range(ranks)]
    parts = []
    for loaded in after:
        loaded.load_state_dict(before[0].state_dict())
        parts.append(_first(loaded, 2))
    seen = [row for step in zip(*parts, strict=True) for batch in step for row in rows([batch])]
    assert seen == stream[8:16]


def _first(data, n):
    batches = iter(data)
    return [next(batches) for _ in range(n)]


@pytest.mark.parametrize(
    "change",
    [
        {"documents": lambda: [*TEXTS, "new"]},
        {"seed": 1},
        {"holdout": 0.2},
        {"packing": "none", "seq_len": 40},
        {"sources": [Source(documents=documents), Source(documents=other_documents)]},
    ],
    ids=["documents", "seed", "holdout", "packing", "sources"],
)
def test_resuming_on_other_data_is_refused_with_the_way_out(change):
    state = loader().state_dict()
    with pytest.raises(UserError, match="exclude_from_loading dataloader"):
        loader(**change).load_state_dict(state)


def test_other_weights_are_other_data():
    def sources(weight):
        return [Source(documents=documents, weight=weight), Source(documents=other_documents, weight=1)]

    with pytest.raises(UserError, match="weights"):
        loader(sources=sources(2)).load_state_dict(loader(sources=sources(1)).state_dict())


@pytest.mark.parametrize("name", ["one", "joined", "weighted"])
def test_the_validation_part_is_disjoint_and_read_once(name):
    config = TextDataLoader.Config(holdout=0.2, **DATA[name])
    parts = split_documents(config, TOKENIZER)
    ours, theirs = ({documents.tokens(n).tobytes() for n in range(len(documents))} for documents in parts)
    texts = [text for source in config.all_sources() for text in source.documents()]
    assert theirs and not ours & theirs and len(ours | theirs) == len(texts)
    validation = loader(holdout=0.2, split="validation", infinite=True, **DATA[name])
    assert validation.infinite is False
    if name != "weighted":  # there the pass ends with the first source that does
        assert labels(validation) == sorted(t for d in theirs for t in np.frombuffer(d, np.int32)[1:].tolist())


def test_weights_decide_how_many_samples_come_from_each_source():
    seen = np.concatenate([x["input"].numpy() for x, _ in _first(loader(infinite=True, **DATA["weighted"]), 500)])
    is_upper = ((seen >= ord("A")) & (seen <= ord("Z"))).any(1)
    assert is_upper.sum() == 300  # 0.3 of 1,000 samples


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([Source(documents=documents, weight=1), Source(documents=other_documents)], "all of them one, or none"),
        ([Source(documents=documents), Source(path="x", format="chat")], "need weights"),
    ],
)
def test_sources_that_cannot_be_read_together_are_refused(sources, message):
    with pytest.raises(UserError, match=message):
        loader(sources=sources)


def test_documents_that_are_all_too_long_are_an_error_and_some_a_warning(caplog):
    with pytest.raises(UserError, match="every document is longer than seq_len"):
        loader(packing="none", seq_len=2)
    loader(packing="none", seq_len=8)
    assert "of 9 documents are longer than seq_len 8" in caplog.text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"split": "validation", "holdout": 0.0}, "holdout=0.0"),
        ({"split": "validation", "packing": "none", "holdout": 0.1}, "longer than seq_len 6"),
    ],
)
def test_a_part_with_nothing_to_read_is_known_before_it_is_read(config, reason):
    """TorchTitan builds the validator's loader when it validates: hours into a run."""
    held = min((f"{i} far too long" for i in range(1000)), key=digest)  # the lowest digest is what is held out
    texts = [held, *(text[:4] for text in TEXTS)]
    with pytest.raises(UserError, match=f"validation part of .* is empty .*{reason}"):
        check_parts(TextDataLoader.Config(documents=lambda: texts, **config), TOKENIZER, 6)


@pytest.mark.parametrize("packing", [None, "whole"])
def test_chat_data_comes_padded_or_packed_with_labels_on_the_assistants_turns_alone(tmp_path, packing):
    tokenizer = chat_tokenizer(tmp_path)
    file = tmp_path / "chat.jsonl"
    talks = [[("user", f"{i} + {i}?"), ("assistant", f"It is {2 * i}.")] for i in range(6)]
    talks = [[{"role": r, "content": c} for r, c in talk] for talk in talks]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    loaded = loader(tokenizer=tokenizer, seq_len=128, format="chat", dataset_path=str(file), packing=packing)
    batches = list(loaded)
    assert {tuple(y.shape) for _, y in batches} == {(2, 128)}
    text = tokenizer.decode([t for _, y in batches for t in y.ravel().tolist() if t != -100], skip_special_tokens=False)
    assert sorted(text.replace("<think>\n\n</think>\n\n", "").split("<|im_end|>")[:-1]) == [
        f"It is {2 * i}." for i in sorted(range(6), key=lambda i: f"It is {2 * i}.")
    ]
    talks_in = [int((x["positions"][row] == 0).sum()) - 1 for x, _ in batches for row in range(2)]
    assert max(talks_in) == (1 if packing is None else max(talks_in)) and (packing is None or max(talks_in) > 1)


def test_a_step_without_any_label_has_loss_and_gradients_zero():
    """TorchTitan divides the summed loss by the number of labels; ours never lets that be 0."""
    from titan_recipes.train.trainer import Trainer
    from titan_recipes.train.watches import LossWatch
    from torchtitan import trainer as titan

    weight = torch.ones(3, requires_grad=True)
    seen = {}

    class Bare(Trainer):
        def __init__(self):
            self.step, self.losses = 1, LossWatch()

    def stock(self, *, global_valid_tokens, **kwargs):
        loss = torch.nn.functional.cross_entropy(weight.expand(2, 3), torch.tensor([-100, -100]), reduction="sum")
        seen["loss"] = loss / global_valid_tokens
        seen["loss"].backward()
        return seen["loss"]

    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(titan.Trainer, "forward_backward_step", stock)
        Bare().forward_backward_step(input_dict={}, labels=None, global_valid_tokens=torch.tensor(0))
    assert seen["loss"].item() == 0 and torch.equal(weight.grad, torch.zeros(3))
