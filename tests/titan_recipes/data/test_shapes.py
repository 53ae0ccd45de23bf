"""Contract: conversations as people have them become the same messages, whatever their shape and file; a shape that
fits none or two is asked about."""

import csv
import json

import pyarrow
import pyarrow.parquet
import pytest
from chat_tokenizer import tokenizer
from titan_recipes.data.chat import render
from titan_recipes.data.shapes import SHAPES, shape_of
from titan_recipes.data.source import Source, rows
from titan_recipes.data.tokens import token_store
from titan_recipes.errors import UserError

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [SYSTEM, {"role": "user", "content": "What is\n2 + 2?"}, {"role": "assistant", "content": '4, I "think".'}]
SHAREGPT = [{"from": "human", "value": TALK[1]["content"]}, {"from": "gpt", "value": TALK[2]["content"]}]
ROWS = {
    "messages": {"messages": TALK},
    "messages as json": {"messages": json.dumps(TALK)},
    "messages and a system prompt": {"messages": TALK[1:], "system": "Be brief."},
    "parts": {"messages": [*TALK[:2], TALK[2] | {"content": [{"type": "text", "text": TALK[2]["content"]}]}]},
    "sharegpt": {"conversations": SHAREGPT, "system": "Be brief."},
    "sharegpt with its system prompt": {"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]},
    "messages of sharegpt turns": {"messages": json.dumps(SHAREGPT), "system": "Be brief."},
    "prompt-completion": {"prompt": TALK[:2], "completion": TALK[2:]},
    "alpaca": {"instruction": "What is\n2 + 2?", "input": "", "output": TALK[2]["content"], "system": "Be brief."},
}


@pytest.fixture
def qwen(tmp_path):
    return tokenizer(tmp_path)


@pytest.mark.parametrize("name", ROWS)
def test_every_shape_is_recognised_and_gives_the_same_tokens(tmp_path, qwen, name, caplog):
    caplog.set_level("INFO")
    (tmp_path / "x.jsonl").write_text(json.dumps(ROWS[name] | {"id": 7}) + "\n")
    store = token_store(Source(path=str(tmp_path / "x.jsonl"), format="chat"), qwen)
    assert qwen.decode(store.tokens_T.tolist(), skip_special_tokens=False) == render(TALK, qwen, "x")[0]
    shape = name.split()[0] if name.split()[0] in SHAPES else "messages"
    assert f"rows are conversations of the shape {shape}" in caplog.text


WRITE = {
    "jsonl": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "json": lambda rows: json.dumps(rows, indent=1).encode(),
    "json of lines": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "json of one row": lambda rows: json.dumps(rows[0]).encode(),
}


def write_csv(rows, delimiter=","):
    import io

    text = io.StringIO()
    table = csv.DictWriter(text, rows[0].keys(), delimiter=delimiter)
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


WRITE |= {"csv": write_csv, "tsv": lambda rows: write_csv(rows, "\t")}


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "bom"])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", WRITE)
def test_every_file_gives_the_same_rows_packed_or_not(tmp_path, kind, packed, bom):
    given = [ROWS["alpaca"]] if kind == "json of one row" else [ROWS["alpaca"], ROWS["alpaca"] | {"input": "2"}]
    file = tmp_path / f"x.{kind.split()[0]}{packed}"
    content = bom + WRITE[kind](given)
    if packed:
        content = pyarrow.Codec({".gz": "gzip", ".zst": "zstd"}[packed]).compress(content, asbytes=True)
    file.write_bytes(content)
    for path in (file, tmp_path):
        assert [row for _, row in rows(Source(path=str(path), format="alpaca"))] == given


def test_a_table_is_read_by_its_shapes_columns(tmp_path):
    given = [ROWS["alpaca"] | {"other": "x" * 9}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), tmp_path / "x.parquet")
    ((_, row),) = rows(Source(path=str(tmp_path / "x.parquet"), format="chat"))
    assert row == ROWS["alpaca"]


def test_a_text_keeps_no_mark_of_an_editor_and_no_carriage_returns(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    assert [row for _, row in rows(Source(path=str(tmp_path)))] == [{"text": "one\n\ntwo\n"}]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_file_that_was_cut_short_is_an_error_and_not_fewer_rows(tmp_path, suffix):
    lines = "".join(json.dumps({"text": f"{i * 7919}"}) + "\n" for i in range(5000)).encode()
    packed = pyarrow.Codec({".gz": "gzip", ".zst": "zstd"}[suffix]).compress(lines, asbytes=True)
    (tmp_path / f"x.jsonl{suffix}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=rf"x\.jsonl\{suffix}"):
        list(rows(Source(path=str(tmp_path))))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "x.json",
            '{"data": [{"text": "a"}], "version": 1}',
            "is one object with 'data', 'version'; expected an array",
        ),
        ("x.json", '[{"text": "a"}, 3]', r"x\.json\[1\]: expected a JSON object, found '3'"),
        ("x.json", '[{"text": "a"}', "is not JSON"),
        ("x.csv", "text,text\na,b\n", "names the columns, each once"),
        ("x.csv", "text,id\na\n", "x.csv:2: 1 values for 2 columns"),
        ("x.csv", "id,body\n1,a\n", "no column 'text'; it has: id, body"),
        ("x.csv", 'text\n"a', "not a readable table"),
    ],
)
def test_a_file_that_is_no_table_is_an_error_naming_the_place(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=reason):
        list(rows(Source(path=str(tmp_path / name))))


def test_rows_of_no_shape_or_of_two_are_asked_about(qwen):
    with pytest.raises(
        UserError, match=r"here: no 'messages' in this row; it has: chat\. .*alpaca: instruction and output"
    ):
        shape_of(["chat"], "chat", None, "here")
    two = ["prompt", "completion", "instruction", "output"]
    with pytest.raises(
        UserError, match=r"rows of prompt-completion or of alpaca.*\n.*--dataloader.format prompt-completion"
    ):
        shape_of(two, "chat", None, "here")
    assert shape_of(two, "alpaca", None, "here").name == "alpaca"
    assert shape_of(["messages", "prompt", "completion"], "chat", None, "here").name == "messages"
    with pytest.raises(UserError, match="rows of format alpaca have several"):
        shape_of(two, "alpaca", "output", "here")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            "a turn is from 'function_call'; known are human",
        ),
        ({"messages": TALK, "system": "Be long."}, "differ; keep one"),
        (ROWS["alpaca"] | {"history": [["a", "b"]]}, "a history of earlier turns"),
        (ROWS["alpaca"] | {"output": 4}, "content of an assistant message is '4', not a string"),
        ({"prompt": "a", "completion": None}, "content of an assistant message is 'None'"),
    ],
)
def test_what_a_shape_would_lose_is_an_error(qwen, row, reason):
    with pytest.raises(UserError, match=reason):
        token_store(Source(documents=lambda: [row], format="chat"), qwen)


def test_turns_of_a_prompt_are_given_and_not_learned(qwen):
    row = {"prompt": [TALK[1], TALK[2], TALK[1]], "completion": "Four."}
    (text, spans) = render(SHAPES["prompt-completion"].messages(row, "x"), qwen, "x")
    assert [text[begin:end] for begin, end in spans] == ["<think>\n\n</think>\n\nFour.<|im_end|>"]


def test_conversations_read_as_texts_are_an_error_that_names_the_option(qwen):
    for name in ("messages", "alpaca", "sharegpt"):
        with pytest.raises(UserError, match=rf"Conversations \({name}\) are read with --dataloader.format chat"):
            token_store(Source(documents=lambda row=ROWS[name]: [row]), qwen)
