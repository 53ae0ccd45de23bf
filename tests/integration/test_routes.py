"""Contract: from the same weights, all routes have plain Transformers' first loss and gradients, in every layout; and
what was not initialised or not read stops the run by name.

The reference is the Transformers class without TorchTitan, each document run alone; so masks, positions, RoPE, loss and
the reduction over ranks are compared as well as the model. Float32, losses and gradients within 1e-5 of the largest
entry.
"""

import os
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_ckpt_adapter import CheckpointReader, Layout, convert_state
from ranks import run_ranks

BOUND = 1e-5
LENGTH, BATCH = 64, 4
TOKENIZER = Path(__file__).parents[2] / "recipes" / "debug_tokenizer"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
FSDP = {"data_parallel_shard_degree": 2}
LAYOUTS = {"one": {}, "fsdp": FSDP, "tp": {"tensor_parallel_degree": 2}, "ep": {**FSDP, "expert_parallel_degree": 2}}
# Transformers' model takes nki-moe's experts by the same override.
RUNS = [
    (route, kind, layout)
    for route in ("native", "transformers", "kernels", "transformers with kernels")
    for kind in ("dense", "moe")
    for layout in LAYOUTS
    if (kind == "moe" or ("kernels" not in route and layout != "ep"))
    and (route != "transformers with kernels" or layout in ("one", "ep"))
] + [("kernels with rope", "dense", "tp")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model with tied weights and YaRN, and an untied mixture of experts with a dense layer, as Hugging Face
    folders.
    """

    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    dense = transformers.Qwen3Config(**SIZES, tie_word_embeddings=True, rope_parameters=YARN)
    moe = transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, tie_word_embeddings=False, rope_parameters=PLAIN, mlp_only_layers=[0]
    )
    widths = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4}  # what kernels take at LNC=1
    wide = transformers.Qwen3MoeConfig(
        **{**SIZES, **EXPERTS, **widths}, tie_word_embeddings=False, rope_parameters=PLAIN
    )
    models = {
        "dense": transformers.Qwen3ForCausalLM(dense),
        "moe": transformers.Qwen3MoeForCausalLM(moe),
        "wide": transformers.Qwen3MoeForCausalLM(wide),
    }
    for name, model in models.items():
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(1.0 if p.dim() == 1 else 0.0, 0.05)
        model.float().save_pretrained(root / name)
    return {name: root / name for name in models}


def documents() -> list[str]:
    return [f"Document {i}: " + "the quick brown fox " * (1 + 3 * i % 7) for i in range(40)]


def first_step(
    rank: int,
    folder: Path,
    route: str,
    layout: dict[str, int],
    run: Path,
    micro_batches: int = 1,
    few: bool = False,
    recompute: bool = False,
) -> dict[str, Any]:
    """One step of the trainer: this rank's batch, the loss, and all gradients under the Hub's names.

    `few`: the first micro-batch of rank 0 keeps one target a row.
    """
    from titan_recipes.checkpoint.manager import StepCheckpoints
    from titan_recipes.config.device_defaults import apply_device_defaults
    from titan_recipes.data.loader import TextDataLoader
    from titan_recipes.models.spec import native, use_model
    from titan_recipes.moe.kernels import NkiExperts, kernel
    from titan_recipes.train.trainer import Trainer
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.moe import GroupedExperts

    config = Trainer.Config(
        model_spec=native("debug"),
        hf_assets_path=str(TOKENIZER),
        dataloader=TextDataLoader.Config(documents=documents, holdout=0.0),
        training=TrainingConfig(
            local_batch_size=BATCH // layout.get("data_parallel_shard_degree", 1) // micro_batches,
            global_batch_size=BATCH,
            seq_len=LENGTH,
            steps=1,
            max_norm=1e9,
        ),
        optimizer=default_adamw(lr=1e-3),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        activation_checkpoint=FullAC.Config() if recompute else None,
        checkpoint=StepCheckpoints.Config(enable=True),
        dump_folder=str(run),
    )
    use_model(config, folder, route=route.split()[0])
    if route.endswith("with kernels"):
        config.override.imports = [kernel("experts")]
    if route.endswith("with rope"):
        config.override.imports = [kernel("rope")]
    for name, degree in layout.items():
        setattr(config.parallelism, name, degree)
    apply_device_defaults(config, "cpu")
    trainer = config.build()
    trainer.checkpointer.load(step=-1)
    assert trainer.should_continue_training()
    batches: list[Any] = []
    gradients: dict[str, torch.Tensor] = {}

    def watched(data: Any) -> Any:
        for batch in data:
            if few and rank == 0 and not batches:
                batch[1][:, 1:] = -100
            batches.append([batch[0]["input"], batch[0]["positions"], batch[1]])
            yield batch

    def keep(*args: Any, **kwargs: Any) -> None:
        for part in trainer.model_parts:
            for name, p in part.named_parameters():
                assert p.grad is not None, name
                gradients[name] = getattr(p.grad, "full_tensor", lambda p=p: p.grad)().detach().clone()

    trainer.optimizers.step = keep
    losses: list[float] = []
    report = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, loss, *a, **k: (losses.append(loss), report(step, loss, *a, **k))
    trainer.step = 1
    trainer.train_step(watched(trainer.batch_generator(trainer.dataloader)))
    trainer.close()
    experts = [type(m) for part in trainer.model_parts for m in part.modules() if isinstance(m, GroupedExperts)]
    assert all((kind is NkiExperts) == ("kernels" in route) for kind in experts)
    hub = convert_state(gradients, Layout.PER_EXPERT).tensors
    arrays = {
        name: t.numpy() for name, t in hub.items()
    }  # tensors would go through shared memory that dies with the rank
    batch = [torch.cat(parts).numpy() for parts in zip(*batches, strict=True)]
    return {"batch": batch, "loss": losses[0], "gradients": arrays if rank == 0 else {}, "kernels": dict(CALLS)}


@cache
def plain(folder: Path, batch: tuple[bytes, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """Transformers alone: each document of each row by itself, the mean loss over all targets, its gradients."""
    tokens, positions, labels = (torch.frombuffer(bytearray(b), dtype=torch.int64).view(BATCH, LENGTH) for b in batch)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    count = int((labels != -100).sum())
    total = torch.zeros(())
    for row, starts, targets in zip(tokens, positions == 0, labels, strict=True):
        begins = [*starts.nonzero().flatten().tolist(), LENGTH]
        for begin, end in pairwise(begins):
            logits = model(row[None, begin:end]).logits[0]
            total = total + F.cross_entropy(logits, targets[begin:end], ignore_index=-100, reduction="sum") / count
    total.backward()
    # mlp.gate of a layer whose experts are fused in memory: same names as on the Hub after conversion
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return total.item(), convert_state(gradients, Layout.PER_EXPERT).tensors


def assert_close(name: str, ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.shape == reference.shape, (name, ours.shape, reference.shape)
    worst, scale = (ours - reference).abs().max().item(), reference.abs().max().item()
    assert worst <= BOUND * scale, f"{name}: max|a-b| = {worst:.3e} = {worst / scale:.2e} max|b|"


@pytest.mark.parametrize("route, kind, layout", RUNS)
def test_the_first_loss_and_all_gradients_are_plain_transformers(
    folders: dict[str, Path], tmp_path: Path, route: str, kind: str, layout: str
) -> None:
    compare(folders, tmp_path, route, kind, layout)


@pytest.mark.parametrize("layout, recompute", [("one", True), ("ep", False)])
def test_on_nki_sim_each_layer_runs_its_kernels_and_the_numbers_are_plain_transformers(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, recompute: bool
) -> None:
    """Route 3 on the kernels themselves: a forward pass, its repetition under full checkpointing, and two backward
    passes.
    """
    from nki_sim.kernel import Program

    run = Program.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS[self.kernel.__name__] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Program, "run", counted)
    monkeypatch.setenv("NKI_MOE_BACKEND", "sim")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    layers = SIZES["num_hidden_layers"]
    for rank in compare(folders, tmp_path, "kernels", "wide", layout, recompute):
        assert rank["kernels"] == {
            "forward": layers * (1 + recompute),
            "backward": layers,
        }


CALLS: Counter[str] = Counter()
"""Kernels that nki-sim ran, by name, in this process."""


def compare(
    folders: dict[str, Path], tmp_path: Path, route: str, kind: str, layout: str, recompute: bool = False
) -> list[dict[str, Any]]:
    """Assert that a first step is plain Transformers'; what each rank reported."""
    degrees = LAYOUTS[layout]
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    ranks = run_ranks(
        first_step, 2 if degrees else 1, folders[kind], route, degrees, tmp_path, 1, False, recompute, timeout=240
    )
    parts = ranks if layout in ("fsdp", "ep") else ranks[:1]  # tensor-parallel ranks have the same batch
    batch = [np.concatenate([part["batch"][i] for part in parts]) for i in range(3)]
    assert ((batch[1] == 0).sum(1) > 1).any()  # packed: there are masks to get wrong
    loss, gradients = plain(folders[kind], tuple(array.tobytes() for array in batch))
    assert ranks[0]["loss"] == pytest.approx(loss, rel=BOUND)
    found = ranks[0]["gradients"]
    if kind == "dense":  # tied: Transformers names it by the embedding
        found.pop("lm_head.weight", None)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(name, torch.from_numpy(found[name]), gradient)
    return ranks


@pytest.mark.parametrize("degrees, micro_batches", [({}, 2), (LAYOUTS["fsdp"], 1)], ids=["accumulated", "fsdp"])
def test_a_target_weighs_the_same_whatever_micro_batch_or_rank_it_is_in(
    folders: dict[str, Path], tmp_path: Path, degrees: dict[str, int], micro_batches: int
) -> None:
    """Case 092: parts with 2 targets and with over a hundred give the gradients of one batch with all of them."""
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    arguments = (folders["dense"], "native", degrees, tmp_path, micro_batches, True)
    ranks = run_ranks(first_step, 2 if degrees else 1, *arguments)
    batch = [np.concatenate([part["batch"][i] for part in ranks]) for i in range(3)]
    counts = (batch[2] != -100).sum(1)
    assert sorted(counts)[:2] == [1, 1] and sorted(counts)[2] > 40, counts
    loss, gradients = plain(folders["dense"], tuple(array.tobytes() for array in batch))
    assert ranks[0]["loss"] == pytest.approx(loss, rel=BOUND)
    for name, gradient in gradients.items():
        assert_close(name, torch.from_numpy(ranks[0]["gradients"][name]), gradient)


def test_nothing_was_patched_for_the_whole_process(folders: dict[str, Path]) -> None:
    """TorchTitan's backend would replace these on the first model; reloading in this process would then be no check."""
    from titan_recipes.models.spec import transformers as spec

    spec(folders["moe"]).model.build()
    for name in ("_init_weights", "_initialize_weights"):
        assert getattr(transformers.PreTrainedModel, name).__module__ == "transformers.modeling_utils"


def test_a_rope_buffer_left_empty_stops_the_run_with_its_name(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_recipes.models.transformers import TransformersQwen3

    monkeypatch.setattr(TransformersQwen3, "_init_rope", lambda self: None)
    with pytest.raises(AssertionError, match=r"hold no value after initialisation: .*rotary_emb\.inv_freq"):
        run_ranks(first_step, 1, folders["dense"], "transformers", {}, tmp_path)


@pytest.mark.parametrize("route", ["native", "transformers"])
def test_one_expert_unread_stops_the_run_with_its_layer(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    read = CheckpointReader._read

    def forgetful(self: Any, output: Any, item: Any, target: torch.Tensor) -> None:
        before = target.clone()
        read(self, output, item, target)
        if output.name.endswith(
            "layers.1.m" + ("oe" if route == "native" else "lp") + ".routed_experts.inner_experts.w1_EFD"
        ):
            target[3] = before[3]

    monkeypatch.setattr(CheckpointReader, "_read", forgetful)
    with pytest.raises(
        AssertionError, match=r"1 parameters or buffers hold no value after loading .*layers\.1\..*w1_EFD"
    ):
        run_ranks(first_step, 1, folders["moe"], route, {}, tmp_path)


def test_a_box_that_is_read_twice_or_never_stops_the_run(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CheckpointReader.read_data

    def confused(self: Any, plan: Any, planner: Any) -> Any:
        plan.items[-1] = plan.items[0]
        return read(self, plan, planner)

    monkeypatch.setattr(CheckpointReader, "read_data", confused)
    with pytest.raises(
        AssertionError, match=r"(?s)2 tensors were not written exactly once.*\(0 of .* elements written\)"
    ):
        run_ranks(first_step, 1, folders["dense"], "native", {}, tmp_path)
