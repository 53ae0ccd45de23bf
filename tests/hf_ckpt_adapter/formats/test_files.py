"""Contract of files.py: no name or link leads out of a folder, nothing but a regular file is opened."""

import os
import resource
from pathlib import Path

import pytest
from hf_ckpt_adapter import Options, diff, open_source
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_tiny import config, sharded, state, write_hub


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    cfg = config(moe=True)
    return write_hub(tmp_path / "hub", cfg, state(cfg))


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    cfg = config(moe=True, num_hidden_layers=4)
    hub = write_hub(tmp_path / "hub", cfg, state(cfg), [[n] for n in state(cfg)])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, before[1]))
    try:
        convert(hub, tmp_path / "fine", "per-expert", options=Options(max_shard_bytes=1))
        convert(hub, tmp_path / "step", "native-wqkv", options=Options(max_shard_bytes=1))
        assert diff(hub, tmp_path / "fine").equal and diff(tmp_path / "step", hub).equal
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(list((tmp_path / "fine").glob("*.safetensors"))) == len(state(cfg)) > 100


def test_a_link_out_of_the_folder_needs_permission(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    shard = folder / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ValueError, match=r"is a link to .*elsewhere.*--follow-symlinks"):
        open_source(folder)
    assert len(open_source(folder, follow_symlinks=True).tensors) == len(state(config()))


def test_a_pipe_instead_of_a_file_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hub")
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(ValueError, match="not a regular file"):
        open_source(folder)
