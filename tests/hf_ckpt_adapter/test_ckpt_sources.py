"""Contract of sources.py: a folder, a cache snapshot or a cached Hub id; links only inside the cache; no
network."""

import os
from pathlib import Path

import pytest
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_ckpt_adapter.sources import find, open_source
from hf_tiny import config, equal, state, write_hub
from safetensors.torch import load_file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache with one model, laid out as huggingface_hub lays it out: snapshots of links into blobs."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--Qwen--Tiny"
    snapshot = repository / "snapshots" / "abc123"
    blobs = repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    for i, path in enumerate(sorted(write_hub(tmp_path / "plain", config(), state(config())).iterdir())):
        path.rename(blobs / f"blob{i}")
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / f"blob{i}", snapshot))
    return repository


@pytest.mark.parametrize("name", ["Qwen/Tiny", "Qwen/Tiny@main", "Qwen/Tiny@abc123"])
def test_a_hub_id_is_found_in_the_cache(tmp_path: Path, cache: Path, name: str) -> None:
    convert(name, tmp_path / "out", "per-expert")
    equal(load_file(tmp_path / "out" / "model.safetensors"), state(config()))
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out" / "tokenizer.json").is_symlink()


def test_the_repository_folder_of_a_cache_means_its_main_snapshot(cache: Path) -> None:
    assert find(cache) == cache / "snapshots" / "abc123"


def test_a_snapshot_whose_link_leaves_its_blobs_is_refused(tmp_path: Path, cache: Path) -> None:
    link = cache / "snapshots" / "abc123" / "model.safetensors"
    target = tmp_path / "outside.safetensors"
    Path(os.path.realpath(link)).rename(target)
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(ValueError, match="outside its folder"):
        open_source(find("Qwen/Tiny"))


def test_an_id_that_is_not_here_says_how_to_fetch_it(cache: Path) -> None:
    with pytest.raises(FileNotFoundError, match="hf download Qwen/Missing"):
        find("Qwen/Missing")


@pytest.mark.parametrize("name", ["no-such-folder", "../x/y", "a/b/c", "/nowhere", "Qwen/Tiny@../../blobs"])
def test_anything_else_is_an_error(cache: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError):
        find(name)


def test_a_revision_that_points_out_of_the_cache_is_refused(cache: Path) -> None:
    (cache / "refs" / "evil").write_text("../../..")
    with pytest.raises(FileNotFoundError, match="no snapshot"):
        find("Qwen/Tiny@evil")
