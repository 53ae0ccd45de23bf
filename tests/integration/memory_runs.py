"""Measure real TorchTitan steps: tensor bytes by part on each of 1-4 gloo ranks, to hold against
neuron_parallel.memory.

The stock trainer, FSDP2, TP, EP, checkpointing and optimizer; attention and the document mask are titan-recipes'.
Routing is forced to be balanced (TorchTitan's own debug switch), since rows an expert gets are an input of the
formulas, not a result.
"""

import random
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from neuron_parallel.model import ModelShape
from neuron_parallel.plan import TORCHTITAN_NAMES, ParallelPlan, Training, errors

from integration.tensor_bytes import TensorBytes

ROOT = Path(__file__).parents[2]
TINY = {
    "vocab_size": 2052,
    "hidden_size": 72,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
DENSE = ModelShape(**TINY)  # type: ignore[arg-type]
TIED = ModelShape(**TINY, tie_word_embeddings=True)  # type: ignore[arg-type]
MOE = ModelShape(**TINY, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)  # type: ignore[arg-type]
LARGEST = ("parameters", "gradients", "moments", "gathered parameters", "gradient buffers", "logits")
KEPT = ("activations", "attention", "dispatch")
STEPS = (2, 3)
"""Both have moments.

What one counts too much, since something was let go of late, the other does not: the lesser counts.
"""


def config_of(plan: ParallelPlan, shape: ModelShape, training: Training, folder: str) -> Any:
    """The recipe's Trainer.Config of a resolved plan."""
    from qwen3_core import Qwen3Config
    from titan_recipes.checkpoint.manager import StepCheckpoints
    from titan_recipes.data.loader import TextDataLoader
    from titan_recipes.models.spec import native
    from titan_recipes.moe.dispatchers import use_dispatcher
    from titan_recipes.train.trainer import Trainer
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    sizes: dict[str, Any] = {name: getattr(shape, name) for name in TINY}
    if shape.num_experts:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        sizes |= {name: getattr(shape, name) for name in names} | {"norm_topk_prob": True}
    qwen3 = Qwen3Config(
        **sizes, max_position_embeddings=4096, rope_theta=1e6, tie_word_embeddings=shape.tie_word_embeddings
    )
    spec = native(qwen3, document_mask="block" if training.attention == "masked" else "causal", flavor="tiny")
    if shape.num_experts:
        factor = {"capacity_factor": training.capacity_factor} if training.dispatcher == "capacity" else {}
        use_dispatcher(spec, training.dispatcher, **factor)
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=shape.vocab_size)
    if training.loss_chunks > 1:
        loss = ChunkedLossWrapper.Config(num_chunks=training.loss_chunks, loss_fn=loss)
    config = Trainer.Config(
        model_spec=spec,
        hf_assets_path=str(ROOT / "recipes" / "debug_tokenizer"),
        dataloader=TextDataLoader.Config(),
        training=TrainingConfig(
            local_batch_size=plan.micro_batch * (plan.micro_batches if plan.pp > 1 else 1),
            global_batch_size=plan.global_batch,
            seq_len=plan.seq_len,
            steps=max(STEPS),
            dtype="float32",
            mixed_precision_param="float32" if training.compute_bytes == 4 else "bfloat16",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_microbatch_size=plan.micro_batch,
            **{field: getattr(plan, name) for name, field in TORCHTITAN_NAMES.items()},
            fsdp_reshard_after_forward=training.reshard,
        ),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        activation_checkpoint={"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[
            training.checkpointing
        ],
        loss=loss,
        checkpoint=StepCheckpoints.Config(enable=False),
        debug=DebugConfig(seed=0, moe_force_load_balance=True),
        comm=CommConfig(trace_buf_size=0),
        dump_folder=folder,
    )
    config.optimizer.implementation = training.optimizer
    return config


def measure(rank: int, plan: ParallelPlan, shape: ModelShape, training: Training) -> dict[str, Any]:
    """Measure on one rank of a gloo group: the largest bytes of LARGEST, those of KEPT after a forward
    pass, and peaks.
    """
    from titan_recipes.device.select import set_device

    set_device("cpu")
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    config = config_of(plan, shape, training, tempfile.mkdtemp(prefix="neuron-parallel-"))
    with ExitStack() as stack:
        if dist.is_initialized():  # the harness has made the group that TorchTitan would make
            from torchtitan import trainer as titan_trainer

            stack.enter_context(
                patch.object(titan_trainer.dist_utils, "init_distributed", lambda *_, **__: dist.get_world_size())
            )
        trainer = config.build()
        batches = trainer.batch_generator(trainer.dataloader)
        count = TensorBytes(logits=_logits_elements(plan, shape, training))
        stack.enter_context(count)
        _name_parts(stack, count, group.FSDPParamGroup, trainer)
        count.name((p for m in trainer.model_parts for p in m.parameters()), "parameters")
        count.name((b for m in trainer.model_parts for b in m.buffers()), "tables")
        trainer.step = 1
        trainer.train_step(batches)
        moments = [
            v
            for o in trainer.optimizers
            for s in o.state.values()
            for v in s.values()
            if torch.is_tensor(v) and v.dim()
        ]
        count.name(moments, "moments")
        kept: Counter[str] = Counter()

        def after_forward(module: Any, args: Any, out: Any) -> None:
            if not kept:  # the first micro-batch
                kept.update(count.settled())

        def before_forward(module: Any, args: Any) -> None:
            count.name((x for x in args if x.is_floating_point()), "activations")  # what a stage received

        stack.enter_context(_removed(trainer.model_parts[-1].register_forward_hook(after_forward)))
        stack.enter_context(_removed(trainer.model_parts[-1].register_forward_pre_hook(before_forward)))
        step_of = trainer.optimizers.step

        def optimize(*args: Any, **kwargs: Any) -> None:
            steps[-1]["peak of forward and backward"] = result.peak
            step_of(*args, **kwargs)

        stack.enter_context(patch.object(trainer.optimizers, "step", optimize))
        steps: list[dict[str, int]] = []
        for trainer.step in STEPS:
            trainer.optimizers.zero_grad()
            result = count.watch()
            kept.clear()
            steps.append({})
            trainer.train_step(batches)
            steps[-1] |= {part: result.largest[part] for part in LARGEST} | {
                f"kept {part}": kept[part] for part in KEPT
            }
            steps[-1]["peak"] = result.peak
    return {what: min(step[what] for step in steps) for what in steps[0]}


def _logits_elements(plan: ParallelPlan, shape: ModelShape, training: Training) -> int:
    return plan.micro_batch * plan.seq_len // plan.cp // training.loss_chunks * (shape.vocab_size // plan.tp)


class _removed:
    """A hook's handle as a context."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


def _name_parts(stack: ExitStack, count: TensorBytes, group: Any, trainer: Any) -> None:
    """Say which code makes which part: FSDP's gathers and reductions, attention, routing and dispatch, the rest of the
    model.
    """

    def within(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with count.part(part):
                return original(*args, **kwargs)

        stack.enter_context(patch.object(owner, name, wrapped))

    within(group, "unshard", "gathered parameters")
    within(group, "wait_for_unshard", "gathered parameters")
    reduce = group.post_backward

    def post_backward(self: Any, *args: Any) -> None:
        grads = [p.unsharded_param.grad for p in self.fsdp_params if hasattr(p, "_unsharded_param")]
        count.name((g for g in grads if g is not None), "gradient buffers")
        del grads
        with count.part("gradient buffers"):
            reduce(self, *args)
        count.name((p.sharded_param.grad for p in self.fsdp_params if p.sharded_param.grad is not None), "gradients")

    stack.enter_context(patch.object(group, "post_backward", post_backward))
    for model in trainer.model_parts:
        within(model, "forward", "activations")
        for layer in model.layers.values():
            within(layer.attention.inner_attention, "forward", "attention")
            if getattr(layer, "moe_enabled", False):
                within(layer.moe.routed_experts.token_dispatcher, "dispatch", "dispatch")
                within(layer.moe.routed_experts.token_dispatcher, "combine", "dispatch")
    from titan_recipes.models import attention

    within(attention, "attention_mask_B1LK", "attention")


def layouts(seed: int, count: int, wide: bool = False) -> list[tuple[ParallelPlan, ModelShape, Training]]:
    """Drawn from the valid grid: 1, 2 or 4 ranks, each kind of model and each checkpointing mode in turn.

    `wide` draws from pipelines, context parallel and several micro-batches too, half of the time two of them at once.
    """
    draw = random.Random(seed)
    found: list[tuple[ParallelPlan, ModelShape, Training]] = []
    while len(found) < count:
        i = len(found)
        shape = (DENSE, MOE, TIED, MOE)[i % 4]
        world = draw.choice((2, 2, 4))
        plan = ParallelPlan(
            dp_replicate=draw.choice((1, 1, 2)),
            tp=draw.choice((1, 2, 2, 4)),
            ep=draw.choice((1, 2, 4)) if shape.num_experts else 1,
            sequence_parallel=draw.random() < 0.8,
            micro_batch=draw.choice((1, 2)),
            seq_len=draw.choice((128, 256, 384)),
        )
        compute: Any = draw.choice((2, 4))
        training = Training(
            checkpointing=("none", "selective", "full")[i % 3],  # type: ignore[arg-type]
            attention=draw.choice(("flash", "masked")),  # type: ignore[arg-type]
            compute_bytes=compute,
            expert_bytes=compute,
            optimizer=draw.choice(("foreach", "fused")),  # type: ignore[arg-type]
            loss_chunks=draw.choice((1, 4, 8)),
            reshard=draw.choice(("default", "default", "always", "never")),  # type: ignore[arg-type]
            selective_keeps_attention=False,
            dispatcher=draw.choice(("gather", "gather", "capacity", "all-to-all")),  # type: ignore[arg-type]
        )
        if wide:
            plan, training = _widened(draw, plan, world, training)
        if plan.dp_replicate * plan.cp * plan.tp * plan.pp <= world and not errors(plan, shape, world, training):
            found.append((plan.resolve(world), shape, training))
    return found


def _widened(draw: random.Random, plan: ParallelPlan, world: int, training: Training) -> tuple[ParallelPlan, Training]:
    pp, cp = draw.choice(((1, 1), (2, 1), (2, 1), (1, 2), (2, 2)))
    plan = replace(plan, pp=pp, cp=cp)
    batches = draw.choice((pp, pp, pp + 1))
    plan = replace(plan, global_batch=plan.resolve(world).global_batch * batches)
    # A rank's part of the sequence always has a mask, and the loss of a pipeline is not chunked.
    attention = "masked" if cp > 1 else training.attention
    return plan, replace(training, attention=attention, loss_chunks=1 if pp > 1 else training.loss_chunks)  # type: ignore[arg-type]
