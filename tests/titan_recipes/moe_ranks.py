"""A tiny mixture of experts in any layout: the same weights and tokens everywhere, loss and gradients put together."""

from typing import Any

import torch

VOCABULARY, BATCH, LENGTH = 96, 4, 16
OPTIONS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 [BATCH, LENGTH], of all ranks together."""
    tokens_BL = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return tokens_BL[:, :-1], tokens_BL[:, 1:]


class Run:
    """The model on this rank. `degrees` are ParallelismConfig's, `prepare` changes the spec before it is built."""

    def __init__(
        self, degrees: dict[str, Any], prepare: Any = None, policy: Any = None, micro_batches: int = 1, layers: int = 2
    ) -> None:
        from qwen3_core import Qwen3Config
        from titan_recipes.models.spec import native
        from titan_recipes.train.trainer import Trainer
        from torch import distributed as dist
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed.utils import set_spmd_backend

        _clear_sharding_prop_cache()  # it holds meshes of a model before this one
        world = dist.get_world_size() if dist.is_initialized() else 1
        parallelism = ParallelismConfig(**degrees)
        training = TrainingConfig(
            seq_len=LENGTH, local_batch_size=BATCH, mixed_precision_param="float32", disable_cuda_graphs=True
        )
        self.dims = ParallelDims.from_config(parallelism, world)
        self.data_ranks = self.dims.dp_replicate * self.dims.dp_shard
        training.local_batch_size = BATCH // self.data_ranks // micro_batches
        training.global_batch_size = BATCH
        set_spmd_backend(parallelism.spmd_backend)
        self.dims.build_mesh()
        spec = native(Qwen3Config(**OPTIONS | {"num_hidden_layers": layers}), document_mask="causal")
        if prepare is not None:
            prepare(spec)
        self.spec = spec
        config = Trainer.Config(model_spec=spec, parallelism=parallelism, training=training)
        spec.model.update_from_config(config=config)
        with torch.device("meta"):
            model = spec.model.build()
        self.model = spec.parallelize_fn(
            model,
            parallel_dims=self.dims,
            training=training,
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=policy,
            dump_folder="",
        )
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
            for name, parameter in self.model.named_parameters():
                _fill(parameter, clean(name))

    def step(self, tokens_BL: torch.Tensor, labels_BL: torch.Tensor, micro_batches: int = 1) -> float:
        """Forward and backward of this rank's rows, loss per token of the whole batch; the part of the loss of this
        rank.
        """
        from torchtitan.components.loss import cross_entropy_loss
        from torchtitan.distributed.utils import get_spmd_context

        rank = self.dims.get_mesh("batch").get_local_rank() if self.data_ranks > 1 else 0
        rows = slice(rank * BATCH // self.data_ranks, (rank + 1) * BATCH // self.data_ranks)
        total = 0.0
        for tokens, labels in zip(
            tokens_BL[rows].chunk(micro_batches), labels_BL[rows].chunk(micro_batches), strict=True
        ):
            with get_spmd_context(parallel_dims=self.dims, spmd_typechecking=False)():
                logits = self.model(tokens, torch.arange(LENGTH).expand_as(tokens))
                loss = cross_entropy_loss(logits, labels, global_vocab_size=VOCABULARY) / labels_BL.numel()
                loss.backward()
            total += loss.item()
        return total

    def gradients(self) -> dict[str, Any]:
        """All gradients, whole, as numpy: tensors would go through shared memory that dies with the rank."""
        return {clean(n): whole(p.grad).numpy() for n, p in self.model.named_parameters()}


def clean(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def _fill(parameter: torch.Tensor, name: str) -> None:
    """This rank's part of a tensor that only its name and shape decide."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    generator = torch.Generator().manual_seed(sum(map(ord, name)) % 9973)
    full = torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1)
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        part = full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        parameter.to_local().copy_(part)
    else:
        parameter.copy_(full)


def train_each(
    rank: int, cases: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, dict[str, Any], dict[str, float]]]:
    """One step of each case (arguments of `Run`) on this rank: its part of the loss, all gradients, what a run would
    log.
    """
    from titan_recipes.moe.router import RoutingWatch

    results = {}
    for name, case in cases.items():
        run = Run(**case)
        loss = run.step(*batch(), micro_batches=case.get("micro_batches", 1))
        results[name] = (loss, run.gradients(), RoutingWatch(run.spec.model, [run.model]).record())
    return results


def assert_same(found: dict[str, Any], expected: dict[str, Any], bound: float = 1e-5) -> None:
    """Each gradient within `bound` of its largest entry: what float32 sums in another order differ by."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        worst, scale = abs(found[name] - gradient).max(), abs(gradient).max()
        assert worst <= bound * scale, f"{name}: max|a-b| = {worst:.3e} = {worst / scale:.2e} max|b|"
