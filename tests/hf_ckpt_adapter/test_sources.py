"""Contract of sources.py: folder, cache snapshot or Hub id are found, and what is no whole checkpoint is called what it
is."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from hf_ckpt_adapter import convert_checkpoint as convert
from hf_ckpt_adapter import export_step
from hf_ckpt_adapter.sources import find, open_source
from hf_tiny import config, equal, state, write_hub
from safetensors.torch import load_file


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    cfg = config(moe=True)
    return write_hub(tmp_path / "hub", cfg, state(cfg))


def test_a_read_only_source_is_enough(tmp_path: Path, hub: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in hub.iterdir()}
    for path in [*hub.iterdir(), hub]:
        path.chmod(path.stat().st_mode & ~0o222)
    convert(hub, tmp_path / "out", "native")
    hub.chmod(0o755)
    assert {p.name: p.stat().st_mtime_ns for p in hub.iterdir()} == before


def test_a_step_without_its_metadata_is_called_what_it_is(tmp_path: Path, hub: Path) -> None:
    convert(hub, tmp_path / "step-10.tmp", "native")
    (tmp_path / "step-10.tmp" / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match="a save that never finished"):
        open_source(tmp_path / "step-10.tmp")


def put_in_cache(repository: Path, source: Path) -> Path:
    """Move a folder into a Hub cache as huggingface_hub lays it out: a snapshot of links into blobs."""
    snapshot = repository / "snapshots" / "abc123"
    blobs = repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    for i, path in enumerate(p for p in sorted(source.rglob("*")) if p.is_file()):
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(exist_ok=True)
        path.rename(blobs / f"blob{i}")
        link.symlink_to(os.path.relpath(blobs / f"blob{i}", link.parent))
    return repository


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache with one model."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    plain = write_hub(tmp_path / "plain", config(), state(config()))
    return put_in_cache(tmp_path / "cache" / "models--Qwen--Tiny", plain)


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


@pytest.mark.parametrize("kind", ["hub", "dcp"])
def test_an_export_with_native_only_state_and_a_step_are_read_from_the_cache_too(tmp_path: Path, kind: str) -> None:
    cfg = config(moe=True)
    bias = {f"model.layers.{n}.mlp.expert_bias_E": torch.arange(8.0) + n for n in range(2)}
    hub = write_hub(tmp_path / "plain", cfg, {**state(cfg), **bias})
    convert(hub, tmp_path / "folder", "per-expert" if kind == "hub" else "native")
    repository = put_in_cache(tmp_path / "models--us--Tiny", tmp_path / "folder")
    convert(repository, tmp_path / "step", "native")
    export_step(tmp_path / "step", tmp_path / "back")
    equal(load_file(tmp_path / "back" / "model.safetensors"), state(cfg))
    kept = load_file(tmp_path / "back" / "titan_state" / "model.safetensors")
    assert {n: t.tolist() for n, t in kept.items()} == {
        f"layers.{n}.moe.expert_bias_E": [float(n + e) for e in range(8)] for n in range(2)
    }


@pytest.mark.parametrize("inner", ["assets", "titan_state", ".metadata"])
def test_a_linked_folder_or_metadata_needs_permission(tmp_path: Path, inner: str) -> None:
    cfg = config(moe=True)
    bias = {f"model.layers.{n}.mlp.expert_bias_E": torch.arange(8.0) for n in range(2)}
    hub = write_hub(tmp_path / "plain", cfg, {**state(cfg), **bias})
    convert(hub, tmp_path / "folder", "per-expert" if inner == "titan_state" else "native")
    shutil.move(tmp_path / "folder" / inner, tmp_path / "elsewhere")
    (tmp_path / "folder" / inner).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{inner} is a link to .*elsewhere.*--follow-symlinks"):
        convert(tmp_path / "folder", tmp_path / "out", "fused")
    convert(tmp_path / "folder", tmp_path / "out", "fused", follow_symlinks=True)


def test_a_folder_with_both_formats_is_not_guessed_at(tmp_path: Path) -> None:
    hub = write_hub(tmp_path / "hub", config(), state(config()))
    convert(hub, tmp_path / "step", "native")
    shutil.copy(hub / "model.safetensors", tmp_path / "step")
    with pytest.raises(ValueError, match=r"\.metadata\) and model.safetensors: which of them is the model"):
        open_source(tmp_path / "step")


def test_a_file_or_an_empty_name_is_not_taken_for_a_hub_id_or_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hub(tmp_path / "hub", config(), state(config()))
    monkeypatch.chdir(tmp_path / "hub")
    with pytest.raises(FileNotFoundError, match="name of the checkpoint is empty"):
        find("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="is a file; expected the folder"):
        find("hub/model.safetensors")


@pytest.mark.parametrize(
    "variables",
    [{"HF_HUB_CACHE": "~/cache"}, {"HUGGINGFACE_HUB_CACHE": "$HOME/cache"}, {"HF_HUB_CACHE": "", "HF_HOME": "~/x/.."}],
)
def test_the_cache_is_where_huggingface_hub_has_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    if "HF_HOME" in variables:
        (tmp_path / "x").mkdir()
        (tmp_path / "cache").rename(tmp_path / "hub")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find("Qwen/Tiny").is_dir()
