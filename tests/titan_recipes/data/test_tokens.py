"""Contract: a source is tokenised once and shared; what changes its tokens makes a new store; a half-written one is
never read.
"""

import json
import multiprocessing
import os

import numpy as np
import pytest
from chat_tokenizer import FOLDER
from titan_recipes.data import tokens
from titan_recipes.data.source import Source, rows
from titan_recipes.data.tokens import token_store
from titan_recipes.errors import UserError
from torchtitan.components.tokenizer import HuggingFaceTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer(tokenizer_path=str(FOLDER))


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": f"Document number {i}."}) + "\n" for i in range(5)))
    return file


def test_the_tokens_are_the_tokenizers_and_each_document_ends_its_text(corpus, tokenizer):
    store = token_store(Source(path=str(corpus)), tokenizer)
    expected = [tokenizer.encode(f"Document number {i}.", add_bos=False, add_eos=True) for i in range(5)]
    assert [store.tokens_T[store.slice_of(i)].tolist() for i in range(len(store))] == expected
    assert all(ids[-1] == tokenizer.eos_id for ids in expected)
    assert store.learned_T is None


def test_a_second_run_reads_what_the_first_wrote(corpus, tokenizer, monkeypatch, own_cache):
    first = token_store(Source(path=str(corpus)), tokenizer)
    monkeypatch.setattr(tokens, "_write", None)  # would fail if it were called
    second = token_store(Source(path=str(corpus)), tokenizer)
    assert second.fingerprint == first.fingerprint and np.array_equal(second.tokens_T, first.tokens_T)
    assert isinstance(second.tokens_T, np.memmap)
    assert [p.suffix for p in own_cache.iterdir() if p.is_dir()] == [""]


def test_a_changed_file_another_column_and_another_tokenizer_make_new_stores(corpus, tokenizer, tmp_path):
    before = token_store(Source(path=str(corpus)), tokenizer)
    lines = corpus.read_text().replace("number 3", "number x")
    corpus.write_text(lines)
    os.utime(corpus, ns=(1, 1))
    changed = token_store(Source(path=str(corpus)), tokenizer)
    assert changed.fingerprint != before.fingerprint
    corpus.write_text(corpus.read_text().replace('"text"', '"body"'))
    os.utime(corpus, ns=(2, 2))
    assert token_store(Source(path=str(corpus), column="body"), tokenizer).fingerprint == changed.fingerprint
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (FOLDER / name).read_text()
        (tmp_path / name).write_text(text.replace('"eos_token": "<|endoftext|>"', '"eos_token": "<|im_end|>"'))
    other = HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    assert token_store(Source(path=str(corpus), column="body"), other).tokens_T[-1] == other.token_to_id("<|im_end|>")


def _count_builds(corpus, cache, started, builds):
    tok = HuggingFaceTokenizer(tokenizer_path=str(FOLDER))
    real = tokens._write

    def counted(*arguments):
        builds.put(os.getpid())
        real(*arguments)

    tokens._write = counted
    started.wait()
    builds.put(token_store(Source(path=str(corpus)), tok, cache).fingerprint)


def test_processes_that_start_together_build_it_once(corpus, tmp_path):
    context = multiprocessing.get_context("fork")
    started, builds = context.Barrier(3), context.Queue()
    children = [
        context.Process(target=_count_builds, args=(corpus, tmp_path / "cache", started, builds)) for _ in range(3)
    ]
    for child in children:
        child.start()
    got = [builds.get(timeout=60) for _ in range(4)]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert sum(isinstance(x, int) for x in got) == 1 and len({x for x in got if isinstance(x, str)}) == 1


def test_what_a_killed_process_left_is_not_taken_for_a_store(corpus, tokenizer, own_cache, monkeypatch):
    real = tokens._write

    def killed(folder, *arguments):
        real(folder, *arguments)
        (folder / "store.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        token_store(Source(path=str(corpus)), tokenizer)
    key = tokens._key(Source(path=str(corpus)), tokenizer)
    (own_cache / f"{key}.tmp").mkdir()  # as kill -9 leaves it
    (own_cache / f"{key}.tmp" / "tokens.int32").write_bytes(b"half")
    monkeypatch.setattr(tokens, "_write", real)
    assert len(token_store(Source(path=str(corpus)), tokenizer)) == 5


def test_duplicates_and_empty_texts_are_left_out_and_counted(tokenizer):
    store = token_store(Source(documents=lambda: ["one", " \n", "two", "one", ""]), tokenizer)
    assert len(store) == 2
    assert "2 documents" in store.summary and "1 duplicates, 2 empty left out" in store.summary


def test_a_source_with_nothing_in_it_is_an_error_that_says_what_was_left_out(tokenizer):
    with pytest.raises(UserError, match=r"is empty.*2 empty left out"):
        token_store(Source(documents=lambda: ["", " "]), tokenizer)


@pytest.mark.parametrize("row", [{"content": "x"}, {"text": 3}, {"text": None}])
def test_a_row_without_text_is_an_error_naming_file_and_line(tmp_path, tokenizer, row):
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n' + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"data\.jsonl:2"):
        token_store(Source(path=str(tmp_path / "data.jsonl")), tokenizer)


@pytest.mark.parametrize("format", ["text", "chat"])
def test_half_a_character_is_an_error_naming_file_and_line(tmp_path, tokenizer, format):
    """JSON can hold one, where a tool cut an emoji in two; a tokenizer cannot."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "cut \ud83d"}]
    row = {"text": "cut \ud83d"} if format == "text" else {"messages": talk}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"data\.jsonl:1: '\\ud83d' is half of a character"):
        token_store(Source(path=str(tmp_path / "data.jsonl"), format=format), tokenizer)


def test_a_file_that_cannot_be_read_is_not_blamed_on_the_cache(corpus, tokenizer, monkeypatch):
    def unreadable(file, *arguments, **options):
        raise OSError(5, "Input/output error", str(file))

    monkeypatch.setattr(type(corpus), "open", unreadable)
    with pytest.raises(UserError, match=r"corpus\.jsonl cannot be read: .*Input/output error"):
        next(rows(Source(path=str(corpus))))


def test_a_cache_that_cannot_be_written_is_an_error_naming_the_option(corpus, tokenizer, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cache_folder"):
        token_store(Source(path=str(corpus)), tokenizer, tmp_path / "file")


def test_a_text_alone_is_kept_in_parts_of_whole_paragraphs_and_loses_nothing(tmp_path, tokenizer):
    """A single .txt is what many have; whole, nothing of it could be held out."""
    paragraphs = [f"Paragraph {i}.\nIts second line.\n\n" for i in range(100)]
    (tmp_path / "book.txt").write_text("".join(paragraphs) + "The end.")
    store = token_store(Source(path=str(tmp_path / "book.txt")), tokenizer)
    parts = [tokenizer.decode(store.tokens_T[store.slice_of(i)].tolist()) for i in range(len(store))]
    assert 20 < len(parts) <= 41 and all(part.startswith(("Paragraph", "The end")) for part in parts)
    assert "".join(parts) == "".join(paragraphs) + "The end."
    assert (store.tokens_T == tokenizer.eos_id).sum() == 1 and store.tokens_T[-1] == tokenizer.eos_id
    assert "one text in 34 parts, cut at blank lines" in store.summary
    (tmp_path / "line.txt").write_text("One line alone.")
    assert len(token_store(Source(path=str(tmp_path / "line.txt")), tokenizer)) == 1
