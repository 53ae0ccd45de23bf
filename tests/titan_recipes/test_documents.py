"""Contract: documents come whole from where the user points, bad sources are one clear error, and no held-out text is trained on."""

import json

import pytest
from titan_recipes.documents import held_out, load_documents, python_docs
from titan_recipes.errors import UserError


def test_python_docs_repeat_no_paragraph_so_nothing_leaks_into_the_held_out_part():
    paragraphs = [" ".join(p.split()) for document in python_docs() for p in document.split("\n\n")]
    assert len(paragraphs) > 500
    assert len(paragraphs) == len(set(paragraphs))


def test_held_out_documents_reach_the_share_and_do_not_depend_on_the_order():
    documents = python_docs()
    sizes = [len(document) for document in documents]
    chosen = {documents[i] for i in held_out(documents, sizes, 0.1)}
    assert sum(map(len, chosen)) >= 0.1 * sum(sizes)
    assert sum(map(len, chosen)) < 0.5 * sum(sizes)
    backwards = documents[::-1]
    assert {backwards[i] for i in held_out(backwards, sizes[::-1], 0.1)} == chosen


def test_a_share_of_zero_holds_out_nothing():
    assert held_out(["a", "b"], [1, 1], 0.0) == set()


def test_one_document_cannot_be_split_and_the_error_says_what_to_do():
    with pytest.raises(UserError, match=r"too few to hold out.*\n.*validation off"):
        held_out(["only"], [4], 0.1)


def test_a_folder_is_read_in_name_order_and_duplicates_are_dropped(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.jsonl").write_text(
        json.dumps({"text": "third"}) + "\n\n" + json.dumps({"text": "first"}) + "\n"
    )
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert load_documents("", str(tmp_path)) == ["first", "second", "third"]


@pytest.mark.parametrize("line", ['{"content": "x"}', "not json", '["text"]', '{"text": 3}'])
def test_a_jsonl_line_without_text_is_an_error_naming_file_and_line(tmp_path, line):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"data\.jsonl:2"):
        load_documents("", str(file))


def test_a_path_that_is_not_there_and_an_empty_dataset_are_errors(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_documents("", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="is empty"):
        load_documents("", str(tmp_path))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match="is empty"):
        load_documents("", str(tmp_path / "blank.txt"))


def test_an_unknown_builtin_and_an_unknown_suffix_are_errors(tmp_path):
    with pytest.raises(UserError, match="python-docs"):
        load_documents("c4", None)
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(UserError, match=r"\.jsonl"):
        load_documents("", str(tmp_path / "x.bin"))
