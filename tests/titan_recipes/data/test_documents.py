"""Contract: the built-in documents repeat nothing, and what is held out depends on the texts alone and never leaks."""

import numpy as np
import pytest
from titan_recipes.data.documents import digest, held_out, python_docs
from titan_recipes.errors import UserError


def as_source(documents, size=len):
    return np.array([digest(d) for d in documents], np.uint64), np.array([size(d) for d in documents])


def out_of(documents, share):
    (out,) = held_out({"it": as_source(documents)}, share)
    return {d for d, chosen in zip(documents, out, strict=True) if chosen}


def test_python_docs_repeat_no_paragraph_so_nothing_leaks_into_the_held_out_part():
    paragraphs = [" ".join(p.split()) for document in python_docs() for p in document.split("\n\n")]
    assert len(paragraphs) > 500
    assert len(paragraphs) == len(set(paragraphs))


def test_held_out_documents_reach_the_share_and_do_not_depend_on_the_order():
    documents = python_docs()
    chosen = out_of(documents, 0.1)
    total = sum(map(len, documents))
    assert 0.1 * total <= sum(map(len, chosen)) < 0.5 * total
    last = max(chosen, key=digest)
    assert sum(map(len, chosen - {last})) < 0.1 * total  # and no document more than needed
    assert out_of(documents[::-1], 0.1) == chosen


def test_a_text_that_two_sources_have_is_on_the_same_side_in_both_and_each_reaches_its_share():
    shared = [f"shared {i}" for i in range(20)]
    one, two = [*shared, *(f"one {i}" for i in range(200))], [f"two {i}" for i in range(30)] + shared
    outs = held_out({"one": as_source(one), "two": as_source(two)}, 0.2)
    chosen = [{d for d, c in zip(docs, out, strict=True) if c} for docs, out in zip((one, two), outs, strict=True)]
    assert chosen[0] & set(shared) == chosen[1] & set(shared)
    for documents, held in zip((one, two), chosen, strict=True):
        assert sum(map(len, held)) >= 0.2 * sum(map(len, documents))


def test_a_share_of_zero_holds_out_nothing():
    assert out_of(["a", "b"], 0.0) == set()


def test_one_document_cannot_be_split_and_the_error_names_the_source_and_says_what_to_do():
    with pytest.raises(UserError, match=r"it has 1 document.*too few to hold out.*\n.*validation off"):
        out_of(["only"], 0.1)
