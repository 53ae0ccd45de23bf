"""Contract of dcp_read.py: metadata and data files are hostile until checked, and no object in them is ever built."""

import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_ckpt_adapter.formats.dcp_read import DcpFolder, read_metadata
from hf_ckpt_adapter.formats.tensors import buffer
from hf_tiny import config, state, write_hub
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_any_dtype_and_a_transposed_tensor_are_read_as_torch_saved_them(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "plain": (torch.arange(24) % 2).reshape(2, 3, 4).to(dtype),
        "turned": (torch.arange(12) % 2).reshape(3, 4).to(dtype).t(),
        "scalar": torch.ones((), dtype=torch.float32).to(dtype),
    }
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    source = DcpFolder(tmp_path)
    for name, tensor in tensors.items():
        info = source.tensors[name]
        data, got = buffer(info.dtype, info.shape)
        half = info.rows // 2 * info.row_bytes
        source.read_rows(name, 0, data[:half])
        source.read_rows(name, info.rows // 2, data[half:])
        assert torch.equal(got.float(), tensor.float()), name
    source.close()


def test_reading_and_writing_dcp_imports_no_distributed_code(tmp_path: Path) -> None:
    write_hub(tmp_path / "hub", config(), state(config()))
    code = (
        "import sys; from hf_ckpt_adapter import convert_checkpoint as convert;"
        f"convert({str(tmp_path / 'hub')!r}, {str(tmp_path / 'dcp')!r}, 'native');"
        f"convert({str(tmp_path / 'dcp')!r}, {str(tmp_path / 'back')!r}, 'per-expert');"
        "sys.exit('torch.distributed.checkpoint' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this must never be printed",)


def test_metadata_with_a_foreign_class_is_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(ValueError, match=r"\.metadata wants to load builtins.print"):
        read_metadata(tmp_path)
    assert "never" not in capfd.readouterr().out


TORCH_NAMES = "torch.distributed.checkpoint.metadata"


def class_named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    """Pickle code: a tuple or list of two of the one before, `depth` times: 2^depth of them when walked through."""
    code = opening + b"q\x00"
    for level in range(depth):
        pair = b"h" + bytes([level]) + b"h" + bytes([level])
        code += b"0" + (pair + closing if opening == b")" else b"](" + pair + closing) + b"q" + bytes([level + 1])
    return code


def metadata_pickle(described: bytes) -> bytes:
    """`.metadata` whose state_dict_metadata is a dict of the keys and values that `described` pushes."""
    return b"\x80\x02" + class_named(TORCH_NAMES, "Metadata") + b"}(" + described + b"u}}\x87R."


@pytest.mark.parametrize(
    "key",
    [nested(60, b")", b"\x86"), b")" + b"\x85" * 1_000_000],
    ids=["takes 2^60 steps to hash", "is too deep to hash"],
)
def test_a_key_that_takes_forever_or_crashes_the_interpreter_is_refused(tmp_path: Path, key: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(metadata_pickle(key + b"N"))
    with pytest.raises(ValueError, match="a tuple where a name is expected"):
        read_metadata(tmp_path)


def test_a_record_that_takes_forever_to_print_is_refused_by_its_type(tmp_path: Path) -> None:
    lists = nested(60, b"]", b"e")
    properties = class_named(TORCH_NAMES, "TensorProperties") + b")\x81(" + lists + b"NNNNtb"
    tensor = class_named(TORCH_NAMES, "TensorStorageMetadata") + properties + b"]]\x87R"
    (tmp_path / ".metadata").write_bytes(metadata_pickle(b"X\x01\x00\x00\x00a" + tensor))
    with pytest.raises(ValueError, match=r"tensor 'a' has a list for its dtype"):
        DcpFolder(tmp_path)


def test_a_description_without_whole_numbers_is_refused(tmp_path: Path) -> None:
    old, new = b"K\x00K\x40\x85q", b"G" + bytes(8) + b"K\x40\x85q"  # an offset of 0.0
    tensors = {"norm.weight": torch.arange(64.0)}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    text = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "__0_0.distcp") as saved, zipfile.ZipFile(text, "w") as forged:
        for member in saved.infolist():
            data = saved.read(member)
            if member.filename.endswith("data.pkl"):
                assert data.count(old) == 1
                data = data.replace(old, new)
            forged.writestr(member.filename, data)
    (tmp_path / "__0_0.distcp").write_bytes(text.getvalue())
    _edit(tmp_path, lambda m: setattr(_first(m), "length", len(text.getvalue())))
    source = DcpFolder(tmp_path)
    with pytest.raises(ValueError, match=r"__0_0\.distcp: tensor 'norm.weight'"):
        source.read_rows("norm.weight", 0, memoryview(bytearray(256)))


def test_a_zip_of_many_entries_is_not_listed(tmp_path: Path) -> None:
    dcp.save({"norm.weight": torch.arange(64.0)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "__0_0.distcp"
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(15_000):
            archive.writestr(f"archive/{number:050d}", b"")
    _edit(tmp_path, lambda m: setattr(_first(m), "length", path.stat().st_size))
    with pytest.raises(ValueError, match=r"norm.weight.*a directory of \d+ bytes"):
        DcpFolder(tmp_path).read_rows("norm.weight", 0, memoryview(bytearray(256)))


def test_byte_items_are_never_unpickled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cfg = config()
    convert(write_hub(tmp_path / "hub", cfg, state(cfg)), tmp_path / "base", "native")
    tensors: dict[str, object] = {
        "optimizer": {"lr": _Bomb()},
        "dataloader": {"rank0": _Bomb()},
        "odd": _Bomb(),
    }
    from hf_ckpt_adapter import Layout, convert_state

    tensors.update(convert_state(state(cfg), Layout.NATIVE).tensors)
    dcp.save(tensors, checkpoint_id=tmp_path / "step-1", no_dist=True)
    report = convert(tmp_path / "step-1", tmp_path / "hf", "per-expert", assets=tmp_path / "hub")
    assert report.left_out == {"optimizer": 1, "dataloader": 1, "byte items": 1}
    assert "never" not in capfd.readouterr().out


def _edit(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _first(metadata) -> object:  # type: ignore[no-untyped-def]
    return next(i for k, i in metadata.storage_data.items() if k.fqn == "norm.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(_first(m), "relative_path", "../../etc/passwd"), "plain name"),
        (lambda m: setattr(_first(m), "relative_path", "/etc/passwd"), "plain name"),
        (lambda m: setattr(_first(m), "offset", 1 << 62), "past the end"),
        (lambda m: setattr(_first(m), "offset", -1), "past the end"),
        (lambda m: setattr(_first(m), "length", 10), "cannot be in 10 bytes"),
        (lambda m: setattr(_first(m), "length", 1000), "not a tensor that torch.save wrote"),
        (lambda m: setattr(_first(m), "transform_descriptors", ["zstd"]), "zstd"),
        (lambda m: setattr(m.state_dict_metadata["norm.weight"], "size", torch.Size([1 << 40])), "add up"),
        (lambda m: m.storage_data.clear(), "no storage is recorded"),
        (lambda m: setattr(m, "storage_data", None), "must be dicts"),
        (lambda m: m.state_dict_metadata["norm.weight"].chunks.clear(), "add up"),
        (lambda m: m.state_dict_metadata["norm.weight"].chunks.append("chunk"), "malformed"),
        (lambda m: m.state_dict_metadata["norm.weight"].chunks[0].__dict__.clear(), "malformed"),
        (
            lambda m: m.state_dict_metadata.update({"norm.weight": m.state_dict_metadata["lm_head.weight"]}),
            "norm.weight",
        ),
    ],
)
def test_metadata_that_lies_is_refused_naming_the_tensor(tmp_path: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    cfg = config()
    convert(write_hub(tmp_path / "hub", cfg, state(cfg)), tmp_path / "step", "native")
    _edit(tmp_path / "step", change)
    (tmp_path / "step" / "complete.json").unlink()
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "step", tmp_path / "out", "per-expert")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", ["head", "middle", "tail", "cut"])
def test_damaged_data_files_are_refused_or_differ_by_checksum_but_never_crash(tmp_path: Path, at: str) -> None:
    cfg = config()
    convert(write_hub(tmp_path / "hub", cfg, state(cfg)), tmp_path / "step", "native")
    path = tmp_path / "step" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    if at == "cut":
        path.write_bytes(data[:-1])
    else:
        position = {"head": 0, "middle": 40, "tail": len(data) - 30}[at]
        data[position : position + 20] = b"\xff" * 20
        path.write_bytes(data)
    with pytest.raises(ValueError, match=r"__0_0\.distcp"):
        convert(tmp_path / "step", tmp_path / "out", "per-expert")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP folder as torch saves it, of two small tensors and one pickled object."""
    folder = tmp_path_factory.mktemp("fuzz")
    tensors = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "c": {"x": [1]},
    }
    dcp.save(tensors, checkpoint_id=folder / "good", no_dist=True)
    (folder / "bad").mkdir()
    return folder


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_fuzz_a_damaged_checkpoint_is_refused_in_words_or_reads_in_bounds(small: Path, data: st.DataObject) -> None:
    victim = data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    for name in (".metadata", "__0_0.distcp"):
        content = bytearray((small / "good" / name).read_bytes())
        if name == victim:
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(0, len(content) - 1))
                if data.draw(st.booleans()):
                    content[at] = data.draw(st.integers(0, 255))
                else:
                    content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
        (small / "bad" / name).write_bytes(content)
    try:
        source = DcpFolder(small / "bad")
        try:
            for name, info in source.tensors.items():
                assert info.nbytes <= 1 << 20
                if len(info.shape) <= 3:
                    source.read_rows(name, 0, memoryview(bytearray(info.nbytes)))
        finally:
            source.close()
    except (ValueError, FileNotFoundError) as error:
        assert str(small / "bad") in str(error) or "__0_0.distcp" in str(error), error
