"""Contract: a DCP checkpoint of four gloo ranks, under any sharding, is exported by one process with no model
built, and every bit of every expert is there. (Cases 008, 025, 026, 035, 065.)"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_ckpt_adapter import diff, export_step
from hf_ckpt_adapter.formats.dcp_read import DcpFolder
from hf_ranks import CONFIG
from hf_tiny import equal, state
from safetensors.torch import load_file

LAYOUTS = ["ep4", "fsdp2-tp2", "ep2-fsdp2", "pp2-fsdp2", "backend-ep2-fsdp2"]
RANKS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    script = str(Path(__file__).with_name("hf_ranks.py"))
    result = subprocess.run([sys.executable, script, str(RANKS), str(folder)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for layout in LAYOUTS:
        (folder / layout / "assets").mkdir()
        (folder / layout / "assets" / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sharding_exports_to_the_same_bits(saved: Path, tmp_path: Path, layout: str) -> None:
    export_step(saved / layout, tmp_path / "hf")
    equal(load_file(tmp_path / "hf" / "model.safetensors"), state(CONFIG))


def test_the_shardings_really_are_what_they_say(saved: Path) -> None:
    """Guards the test above: a save that was not sharded would prove nothing."""
    experts = "layers.0.moe.routed_experts.inner_experts.w2_EDF"
    boxes = {name: DcpFolder(saved / name)._chunks for name in LAYOUTS if "backend" not in name}
    assert [c.sizes for c in boxes["ep4"][experts]] == [(2, 64, 48)] * 4
    assert [c.sizes for c in boxes["fsdp2-tp2"][experts]] == [(4, 64, 24)] * 4
    assert [c.sizes for c in boxes["fsdp2-tp2"]["tok_embeddings.weight"]] == [(80, 64)] * 4
    assert [c.sizes for c in boxes["pp2-fsdp2"]["layers.1.attention.wo.weight"]] == [(32, 128)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sharding_is_loaded_from_a_hub_folder_and_a_rank_reads_its_share_alone(saved: Path, layout: str) -> None:
    """The ranks compared every shard themselves (hf_ranks.py); here it is counted that they did not read the rest.

    Experts are split over the ranks in each of these layouts; TP's split of columns alone makes two ranks read a
    row."""
    weights = sum(t.nbytes for t in state(CONFIG).values())
    experts = sum(t.nbytes for n, t in state(CONFIG).items() if ".experts." in n)
    read = [int((saved / f"{layout}-bytes-{rank}").read_text()) for rank in range(RANKS)]
    if layout == "ep4":
        assert read == [weights - experts + experts // 4] * 4
    else:
        assert sum(read) < 2.5 * weights and max(read) < 0.75 * weights


def test_a_tied_pair_in_a_file_is_one_matrix_on_every_rank_and_refused_on_every_rank_if_it_is_not(saved: Path) -> None:
    """Case 008; the ranks compared the pair that is equal themselves."""
    for rank in range(RANKS):
        words = (saved / f"moved-{rank}").read_text()
        assert "'lm_head.weight' and 'model.embed_tokens.weight' differ by up to 0.5" in words


def test_two_shardings_of_one_model_do_not_differ(saved: Path) -> None:
    assert diff(saved / "ep4", saved / "fsdp2-tp2").equal


def test_a_missing_rank_file_is_an_error_by_name(saved: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved / "ep4", tmp_path / "step")
    (tmp_path / "step" / "__3_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match=r"__3_0\.distcp"):
        export_step(tmp_path / "step", tmp_path / "hf")


def test_a_sharded_state_dict_converts_to_whole_tensors(saved: Path) -> None:
    gathered = torch.load(saved / "gathered.pt", weights_only=True)
    equal(gathered, state(CONFIG))
    for name, tensor in gathered.items():
        assert (tensor == 0).float().mean() == (state(CONFIG)[name] == 0).float().mean(), name
