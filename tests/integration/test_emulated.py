"""Contract: a run on the emulated neuron device has CPU's numbers to the bit; random weights are one process's.

The emulated device and its rules are tested in tests/neuron_emu.
"""

import json
from pathlib import Path

import pytest
from emu_ranks import run

from integration.app import run_app

FLOAT32 = ("--training.mixed_precision_param", "float32", "--training.steps", "3")
NUMBERS = ("loss", "grad_norm", "validation_loss")


def trained(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Train in `folder`; the losses and gradient norms that were written, unrounded."""
    ended = run_app(*arguments, *FLOAT32, "--dump_folder", str(folder), cwd=folder.parent)
    assert ended.code == 0, ended.out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in NUMBERS if name in row} for row in rows]


def test_the_debug_recipe_trains_to_cpus_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_EMU_REPORT", str(tmp_path / "report"))
    emulated = trained(tmp_path / "neuron", "debug", "--nproc", "1", "--device", "neuron", "--emulate")
    assert emulated == trained(tmp_path / "cpu", "debug", "--nproc", "1", "--device", "cpu")
    assert len(emulated) >= 3
    report = (tmp_path / "report.rank0").read_text()
    assert "neuron (emulated)" in report
    # The variable that lifts them is set for apps/train's own ranks.
    assert "bounds-check" not in report


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["debug", "debug_moe"])
@pytest.mark.parametrize("axis", ["data_parallel_shard_degree", "tensor_parallel_degree"])
def test_two_ranks_train_to_cpus_bits(tmp_path, recipe, axis):
    layout = (recipe, "--nproc", "2", f"--parallelism.{axis}", "2")
    emulated = trained(tmp_path / "neuron", *layout, "--device", "neuron", "--emulate")
    assert emulated == trained(tmp_path / "cpu", *layout, "--device", "cpu")


def test_random_weights_are_one_processs_though_the_device_has_set_rng_state():
    out = run(
        """
import torch.distributed as dist
from titan_recipes.models.initialization import normal_
dist.init_process_group("neuron")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros
weights = zeros(8, 6, device_mesh=init_device_mesh("neuron", (2,)), placements=[Shard(0)])
torch.manual_seed(3)
normal_(weights, std=0.5)
torch.manual_seed(3)
print(torch.equal(weights.full_tensor().cpu(), torch.nn.init.normal_(torch.empty(8, 6), std=0.5)))
""",
        2,
    )
    assert [text.strip() for text in out] == ["True", "True"]
