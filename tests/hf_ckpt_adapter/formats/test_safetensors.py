"""Contract of safetensors.py: an index and a header are hostile until checked; refused with file and tensor named,
before data is read, in bounded memory. (Cases 060-076.)"""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_ckpt_adapter import open_source
from hf_ckpt_adapter.formats.safetensors import SafetensorsFolder, read_header
from hf_tiny import config, equal, sharded, state, write_hub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def edit_index(folder: Path, **changes: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(changes)
    path.write_text(json.dumps(index))


def write_header(path: Path, header: Any, data: bytes = bytes(64), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (4, 4), offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_all_missing_shards_are_named_before_any_tensor_is_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    for n in (2, 3):
        (folder / f"model-0000{n}-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"2 of 3 files.*model-00002-of-00003.*model-00003-of-00003"):
        open_source(folder)


@pytest.mark.parametrize(
    "place",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../b.safetensors",
        "../x.safetensors",
        "x.bin",
        "",
        "..",
        "x" * 300 + ".safetensors",
        "\ud800.safetensors",
    ],
)
def test_an_index_that_points_out_of_its_folder_is_refused(tmp_path: Path, place: str) -> None:
    folder = sharded(tmp_path / "hub")
    edit_index(folder, **{"model.norm.weight": place})
    with pytest.raises(ValueError, match=r"'model.norm.weight' is placed in"):
        open_source(folder)


def test_a_tensor_in_two_shards_comes_from_the_one_the_index_names_with_a_warning(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    path = folder / "model-00001-of-00003.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.full((64,), -1.0)}, path)
    with pytest.warns(UserWarning, match=r"model.norm.weight.*model-00001"):
        report = convert(folder, tmp_path / "out", "per-expert")
    assert any("model.norm.weight" in w for w in report.warnings)
    equal(load_file(tmp_path / "out" / "model.safetensors"), state(config()))


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    (folder / "model.safetensors.index.json").unlink()
    path = folder / "model-00001-of-00003.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.ones(64)}, path)
    with pytest.raises(ValueError, match=r"'model.norm.weight' is in model-00001.* and in model-00003"):
        open_source(folder)


def test_shards_without_an_index_are_one_model(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    (folder / "model.safetensors.index.json").unlink()
    assert open_source(folder).tensors.keys() == state(config()).keys()


def test_a_single_file_beside_shards_without_an_index_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    (folder / "model.safetensors.index.json").unlink()
    save_file(state(config()), folder / "model.safetensors")
    with pytest.raises(ValueError, match="which of them is the model"):
        open_source(folder)


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_that_the_names_of_the_others_count_is_missed_by_name(tmp_path: Path, index: bool) -> None:
    """Case 212: a model of fewer layers would come out of it, with --fit-config without a word."""
    folder = sharded(tmp_path / "hub")
    lost = "model-00002-of-00003.safetensors"
    (folder / lost).unlink()
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"] = {t: f for t, f in content["weight_map"].items() if f != lost}
    path.write_text(json.dumps(content)) if index else path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"count 3 files by their names, and 1 are missing: {lost}"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize(("total", "fine"), [(None, True), ("absent", True), (1, False), ("many", False)])
def test_the_bytes_that_an_index_promises_are_there(tmp_path: Path, total: Any, fine: bool) -> None:
    folder = sharded(tmp_path / "hub")
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["metadata"] = {} if total == "absent" else {"total_size": total}
    path.write_text(json.dumps(content))
    if fine:
        assert SafetensorsFolder(folder).tensors.keys() == state(config()).keys()
    else:
        with pytest.raises(ValueError, match=rf"total_size is {total}, and the tensors that it names have \d+ bytes"):
            SafetensorsFolder(folder)


def test_only_files_of_the_index_are_used(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    for stray in ("adapter.safetensors", "consolidated.safetensors", "model.safetensors"):
        (folder / stray).write_bytes(b"not even safetensors")
    convert(folder, tmp_path / "out", "per-expert")
    equal(load_file(tmp_path / "out" / "model.safetensors"), state(config()))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_named_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(FileNotFoundError, match=rf"{name}.*never opened"):
        open_source(tmp_path)


def test_a_tensor_that_the_index_does_not_know_is_an_error(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    path = folder / "model-00001-of-00003.safetensors"
    save_file({**load_file(path), "model.layers.7.new.weight": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"model-00001.*'model.layers.7.new.weight'"):
        open_source(folder)


HOSTILE = {
    "shape larger than bytes": {"t": entry(shape=(5, 4))},
    "end past file": {"t": entry(offsets=(0, 1 << 60), shape=(1 << 58,))},
    "overlap": {"t": entry(), "u": entry(offsets=(32, 64), shape=(8,))},
    "gap": {"t": entry(shape=(8,), offsets=(0, 32)), "u": entry(shape=(4,), offsets=(48, 64))},
    "bytes of nobody": {"t": entry(shape=(8,), offsets=(0, 32))},
    "unknown dtype": {"t": entry(dtype="F4")},
    "dtype no string": {"t": {**entry(), "dtype": ["F32"]}},
    "negative size": {"t": entry(shape=(-4, -4))},
    "boolean size": {"t": entry(shape=(True, 16))},
    "float size": {"t": entry(shape=(4.0, 4))},
    "many dimensions": {"t": entry(shape=[1] * 100)},
    "backward offsets": {"t": entry(offsets=(64, 0))},
    "negative offset": {"t": entry(offsets=(-64, 0))},
    "three offsets": {"t": entry(offsets=(0, 32, 64))},
    "no dtype": {"t": {"shape": [16], "data_offsets": [0, 64]}},
    "extra field": {"t": {**entry(), "more": 1}},
    "not an object": {"t": 5},
    "list": ["t"],
    "nothing, and much of it": {"t": entry(), "u": entry(shape=(0, 1 << 70), offsets=(64, 64))},
    "huge shape": {"t": entry(shape=(1 << 62, 1 << 62, 1 << 62))},
    "metadata no strings": {"__metadata__": {"a": 1}, "t": entry()},
    "not json": b"{",
    "not utf-8": b"\xff\xfe",
    "duplicate key": b'{"t": 1, "t": 2}',
    "deep": b"[" * 200_000,
    "nan": b"NaN",
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused_naming_the_file(tmp_path: Path, header: Any) -> None:
    path = write_header(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_header(path)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 10_000])
def test_a_header_longer_than_its_file_is_refused_in_little_memory(tmp_path: Path, length: int) -> None:
    path = write_header(tmp_path / "model.safetensors", {"t": entry()}, length=length)
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"declares a header of {length} bytes"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    save_file(state(config()), tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_header(tmp_path / "model.safetensors")


def test_one_byte_too_many_is_refused(tmp_path: Path) -> None:
    save_file(state(config()), tmp_path / "model.safetensors")
    with open(tmp_path / "model.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="belong to no tensor"):
        read_header(tmp_path / "model.safetensors")


def test_every_dtype_is_read_as_the_reference_reads_it(tmp_path: Path) -> None:
    from hf_ckpt_adapter.formats.tensors import DTYPES, buffer

    tensors = {name: torch.ones(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    for name, tensor in tensors.items():
        data, got = buffer(source.tensors[name].dtype, source.tensors[name].shape)
        source.read_rows(name, 0, data)
        assert got.dtype == tensor.dtype and torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name
    source.close()


def test_a_missing_source_index_still_gives_the_union_of_keys(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub", moe=True)
    (folder / "model.safetensors.index.json").unlink()
    convert(folder, tmp_path / "out", "per-expert")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as handle:
        assert set(handle.keys()) == state(config(moe=True)).keys()


def test_experts_of_a_layer_may_lie_in_several_shards(tmp_path: Path) -> None:
    cfg = config(moe=True)
    names = list(state(cfg))
    early = [n for n in names if ".experts." not in n or int(n.split(".")[5]) < 5]
    folder = write_hub(tmp_path / "hub", cfg, state(cfg), [early, [n for n in names if n not in early]])
    convert(folder, tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "back", "per-expert")
    equal(load_file(tmp_path / "back" / "model.safetensors"), state(cfg))


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, path)
    return path.read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_a_damaged_file_is_refused_in_words_or_reads_in_bounds(
    tmp_path: Path, valid: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "word"]))
        if kind == "flip":
            damaged[at] = data.draw(st.integers(0, 255))
        elif kind == "cut" and at:
            del damaged[at:]
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(max_size=9))
        else:
            word = data.draw(st.sampled_from([b"9" * 20, b"-1", b"[", b'"F64"', b'"data_offsets"', b"null", b"1e9"]))
            damaged[at : at + len(word)] = word
    path = tmp_path / "model.safetensors"
    path.write_bytes(damaged)
    try:
        source = SafetensorsFolder(tmp_path)
    except ValueError as error:
        assert "model.safetensors" in str(error)
        return
    for name, info in source.tensors.items():
        assert info.nbytes <= len(damaged)
        source.read_rows(name, 0, memoryview(bytearray(info.nbytes)))
    source.close()


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=8), x),
        max_leaves=12,
    )
)
def test_fuzz_any_json_as_an_index_is_refused_in_words(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.mktemp("index")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    with pytest.raises((ValueError, FileNotFoundError), match="index"):
        SafetensorsFolder(folder)


def test_an_adapter_beside_the_weights_is_mentioned(tmp_path: Path) -> None:
    """Case 243: the weights are those of its base, and whoever trained it means another model."""
    hub = write_hub(tmp_path / "hub", config(), state(config()))
    (hub / "adapter_config.json").write_text("{}")
    save_file({"lora_A": torch.zeros(1)}, hub / "adapter_model.safetensors")
    report = convert(hub, tmp_path / "out", "native")
    assert any("adapter_config.json, adapter_model.safetensors lie beside" in text for text in report.warnings)
