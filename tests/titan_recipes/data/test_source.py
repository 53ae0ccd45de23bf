"""Contract: documents come whole and in order from every place a user can point at; a bad place is one clear error
naming it.
"""

import json

import pyarrow
import pyarrow.parquet
import pytest
from titan_recipes.data.source import Source, rows
from titan_recipes.errors import UserError

TABLE = pyarrow.table({"id": [1, 2, 3], "text": ["first", "second", "third"]})


def texts(path, **options):
    return [row["text"] for _, row in rows(Source(path=str(path), **options))]


def write_parquet(file):
    pyarrow.parquet.write_table(TABLE, file, row_group_size=2)


def write_arrow(new_writer):
    def write(file):
        with pyarrow.OSFile(str(file), "wb") as sink, new_writer(sink, TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=2)

    return write


def write_jsonl(file):
    file.write_text("\n\n".join(json.dumps(row) for row in TABLE.to_pylist()) + "\n")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.jsonl", write_jsonl),
        ("x.parquet", write_parquet),
        ("stream.arrow", write_arrow(pyarrow.ipc.new_stream)),
        ("file.arrow", write_arrow(pyarrow.ipc.new_file)),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, write):
    write(tmp_path / name)
    assert texts(tmp_path / name) == ["first", "second", "third"]
    places = [place for place, _ in rows(Source(path=str(tmp_path / name)))]
    assert len(set(places)) == 3 and all(name in place for place in places)


def test_a_dataset_that_the_datasets_library_saved_is_read_without_its_cache_files(tmp_path):
    import datasets

    saved = datasets.Dataset.from_dict({"text": ["first", "second"]})
    saved.save_to_disk(tmp_path / "saved")
    write_arrow(pyarrow.ipc.new_stream)(tmp_path / "saved" / "cache-0123.arrow")
    assert texts(tmp_path / "saved") == ["first", "second"]


def test_a_folder_is_read_in_name_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.jsonl").write_text(json.dumps({"text": "third"}) + "\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert texts(tmp_path) == ["first", "second", "third"]


@pytest.mark.parametrize("line", ["not json", '["text"]', '"text"', "{", pytest.param("[" * 100_000, id="deep")])
def test_a_jsonl_line_that_is_no_object_is_an_error_naming_file_and_line(tmp_path, line):
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"data\.jsonl:2"):
        texts(tmp_path / "data.jsonl")


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    write_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"no column 'content'; it has: id, text"):
        texts(tmp_path / "x.parquet", column="content")


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_file_that_is_not_what_its_name_says_is_an_error_naming_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"no such thing" * 10)
    with pytest.raises(UserError, match=name):
        texts(tmp_path / name)


def test_a_path_that_is_not_there_an_empty_folder_and_an_unknown_suffix_are_errors(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        texts(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is empty"):
        texts(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(UserError, match=r"\.parquet"):
        texts(tmp_path / "x.bin")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8"):
        texts(tmp_path / "latin.txt")


def test_what_lies_beside_the_data_is_not_read_for_it(tmp_path):
    """A folder as `hf download` and editors leave it; a data set's card is no row, a README among texts is a text."""
    write_parquet(tmp_path / "x.parquet")
    for name in ("README.md", ".cache/old.jsonl", ".hidden.txt", "cache-notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "not data"}')
    (tmp_path / "odd.txt").mkdir()
    assert texts(tmp_path) == ['{"text": "not data"}', "first", "second", "third"]  # cache-notes.txt is the user's own
    (tmp_path / "x.parquet").unlink()
    assert len(texts(tmp_path)) == 2


def test_a_link_that_leads_nowhere_is_an_error_and_not_a_file_less(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(UserError, match=r"b\.jsonl is a link to gone\.jsonl, which is not there"):
        texts(tmp_path)


def test_a_parquet_file_damaged_inside_is_an_error_naming_it(tmp_path):
    """Its schema reads well, its pages do not: pyarrow has an OSError for that."""
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(TABLE.select(["text"]), file)
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(36) + content[40:])
    with pytest.raises(UserError, match=r"x\.parquet cannot be read: Couldn't deserialize"):
        texts(file)


def test_text_in_a_table_that_is_not_utf8_is_an_error_naming_the_file(tmp_path):
    latin = pyarrow.table({"text": pyarrow.array([b"caf\xe9"]).view(pyarrow.string())})
    pyarrow.parquet.write_table(latin, tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet: not UTF-8 text"):
        texts(tmp_path / "x.parquet")


def test_fields_that_a_table_filled_in_are_not_there_and_nulls_of_jsonl_are(tmp_path):
    """A table has one schema: a field of any row is, as None, in all. In JSON a null was written by somebody."""
    calls = [{"name": "f", "arguments": {"limit": None}}, {"name": "g", "arguments": {"limit": 3}, "strict": True}]
    talks = [{"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]} for call in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(talks), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    found = {
        name: [row["messages"][0]["tool_calls"] for _, row in rows(Source(path=str(tmp_path / name), format="chat"))]
        for name in ("x.parquet", "x.jsonl")
    }
    assert found["x.parquet"] == [[{"name": "f", "arguments": {}}], [calls[1]]]
    assert found["x.jsonl"] == [[call] for call in calls]


def test_a_hub_dataset_without_a_network_is_an_error_that_says_how_to_get_it(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"(?s)'owner/no-such-data' could not be loaded.*hf download --repo-type dataset"
    ):
        list(rows(Source(hub="owner/no-such-data")))


def test_a_hub_dataset_is_read_by_name(monkeypatch):
    """The library's own loader is what downloads; here it is given a dataset that lies on disk."""
    import datasets

    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_dict({"text": ["first", "second"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = Source(hub="owner/data", subset="main", hub_split="test")
    assert [row["text"] for _, row in rows(source)] == ["first", "second"]
    assert asked == [(("owner/data", "main"), {"split": "test"})]
    with pytest.raises(UserError, match="no column 'content'; it has: text"):
        list(rows(Source(hub="owner/data", column="content")))


def test_a_source_is_exactly_one_place_with_a_sensible_weight():
    with pytest.raises(UserError, match="one of path, hub and documents; found path, hub"):
        Source(path="x", hub="y")
    with pytest.raises(UserError, match="none of them"):
        Source()
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="not a positive number"):
            Source(path="x", weight=weight)
