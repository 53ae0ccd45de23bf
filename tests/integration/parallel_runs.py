"""Train the same steps in many layouts: the rows of docs/parallelism.md, and the sample of them that every CI run
takes.

All layouts start from one Hugging Face folder with the same global batch, in float32, so that only the layout differs.
A group of gloo ranks trains several layouts one after the other, since importing TorchTitan costs more than a row.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks

__all__ = [
    "KINDS",
    "LAYOUTS",
    "MAX_NORM",
    "ROUTES",
    "STEPS",
    "Layout",
    "Ran",
    "Route",
    "alone",
    "layout",
    "make_models",
    "train_layouts",
]

STEPS, LENGTH, BATCH = 10, 32, 8
MAX_NORM = 1.0
"""Gradient norms are 2 to 4 here: every step is clipped."""
TOKENIZER = Path(__file__).parents[2] / "recipes" / "debug_tokenizer"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": (0,)}
KINDS = {"dense": SIZES, "moe": SIZES | EXPERTS}


def stock_experts(spec: Any) -> None:
    """TorchTitan's own experts, which compute in bfloat16 whatever their parameters are."""
    from titan_recipes.moe.layer import SameDtypeExperts
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    for _, config, _, _ in spec.model.traverse(RoutedExperts.Config):
        ours = config.inner_experts
        assert type(ours) is SameDtypeExperts.Config
        config.inner_experts = GroupedExperts.Config(**{f.name: getattr(ours, f.name) for f in fields(ours) if f.init})


@dataclass(frozen=True)
class Route:
    """A column of the table."""

    name: str
    use_model: str
    """What `use_model` calls the route."""
    kinds: tuple[str, ...] = ("dense", "moe")
    change: Callable[[Any], None] | None = None
    """Done to the model spec."""
    layouts: tuple[str, ...] | None = None
    """Names of the rows that it has; all by default."""
    bfloat16: bool = False
    """Whether part of it computes in bfloat16 whatever the parameters are: then the bound is another."""


OF_EXPERTS = ("FSDP2", "TP2", "CP2", "PP2", "FSDP2 EP2", "TP2 EP2", "FSDP2xTP2 EP2", "FSDP2xPP2 EP2")
"""Rows of routes that are the native one but for the experts."""

ROUTES = (
    Route("native", "native"),
    Route("transformers", "transformers"),
    Route("kernels", "kernels", ("moe",), layouts=OF_EXPERTS),
    Route("native, stock experts", "native", ("moe",), stock_experts, OF_EXPERTS, bfloat16=True),
)


@dataclass(frozen=True)
class Layout:
    """Degrees by TorchTitan's names without `_degree`, and other fields of its parallelism config."""

    name: str
    degrees: dict[str, int]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        ranks = 1
        for axis, degree in self.degrees.items():
            ranks *= 1 if axis == "expert_parallel" else degree  # EP takes its ranks from the other axes
        return ranks

    native_only: bool = False
    validates: bool = True

    def suits(self, kind: str, route: "Route") -> bool:
        if route.layouts is not None and self.name not in route.layouts:
            return False
        return (kind == "moe" or EP not in self.degrees) and not (
            self.native_only and route.use_model == "transformers"
        )

    @property
    def data_ranks(self) -> int:
        return self.degrees.get("data_parallel_shard", 1) * self.degrees.get("data_parallel_replicate", 1)


FSDP, HSDP, TP, CP, PP, EP = (
    "data_parallel_shard",
    "data_parallel_replicate",
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "expert_parallel",
)
LAYOUTS = (
    Layout("1 rank", {}),
    Layout("FSDP2", {FSDP: 2}),
    Layout("DDP2", {HSDP: 2}),
    Layout("TP2", {TP: 2}),
    Layout("CP2", {CP: 2}),
    Layout("CP2 unbalanced", {CP: 2}, {"context_parallel_load_balancer": None}),
    Layout("PP2", {PP: 2}),
    Layout("PP2 GPipe", {PP: 2}, {"pipeline_parallel_schedule": "GPipe"}),
    Layout("PP2 interleaved", {PP: 2}, {"pipeline_parallel_schedule": "Interleaved1F1B"}),
    Layout("PP2 zero bubble", {PP: 2}, {"pipeline_parallel_schedule": "ZBVZeroBubble"}, validates=False),
    Layout("FSDP4", {FSDP: 4}),
    Layout("HSDP2x2", {HSDP: 2, FSDP: 2}),
    Layout("FSDP2xTP2", {FSDP: 2, TP: 2}),
    Layout("FSDP2xCP2", {FSDP: 2, CP: 2}),
    Layout("FSDP2xPP2", {FSDP: 2, PP: 2}),
    Layout("TP2xCP2", {TP: 2, CP: 2}),
    Layout("TP2xPP2", {TP: 2, PP: 2}),
    Layout("CP2xPP2", {CP: 2, PP: 2}),
    Layout("CP4", {CP: 4}),
    Layout("PP4", {PP: 4}),
    Layout("TP2 without SP", {TP: 2}, {"enable_sequence_parallel": False}, native_only=True),
    Layout("FSDP2xTP2 partial_dtensor", {FSDP: 2, TP: 2}, {"spmd_backend": "partial_dtensor"}, native_only=True),
    Layout("FSDP2 EP2 partial_dtensor", {FSDP: 2, EP: 2}, {"spmd_backend": "partial_dtensor"}, native_only=True),
    Layout("FSDP2 EP2", {FSDP: 2, EP: 2}),
    Layout("TP2 EP2", {TP: 2, EP: 2}),
    Layout("CP2 EP2", {CP: 2, EP: 2}),
    Layout("FSDP4 EP2", {FSDP: 4, EP: 2}),
    Layout("FSDP4 EP4", {FSDP: 4, EP: 4}),
    Layout("HSDP2x2 EP2", {HSDP: 2, FSDP: 2, EP: 2}),
    Layout("FSDP2xTP2 EP2", {FSDP: 2, TP: 2, EP: 2}),
    Layout("FSDP2xTP2 EP4", {FSDP: 2, TP: 2, EP: 4}),
    Layout("FSDP2xCP2 EP2", {FSDP: 2, CP: 2, EP: 2}),
    Layout("FSDP2xPP2 EP2", {FSDP: 2, PP: 2, EP: 2}),
)


def layout(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


@dataclass(frozen=True)
class Ran:
    """What one rank saw of one layout."""

    losses: list[float]
    """-1 on ranks without the pipeline's last stage."""
    grad_norms: list[float]
    validation: float | None
    """None where the layout cannot validate."""
    first_loss: str
    """What was said of the first loss, empty where nothing was."""
    random_weights: float | None
    """A number that any other initialisation would change; None with pipeline stages, whose seeds differ."""


def make_models(root: Path) -> dict[str, Path]:
    """A folder of float32 weights for each kind."""
    import transformers
    from qwen3_core import Qwen3Config

    torch.manual_seed(1)
    for kind, sizes in KINDS.items():
        hf = transformers.AutoConfig.for_model(**Qwen3Config(**sizes).to_hf("transformers-5"))
        model = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(1.0 if p.dim() == 1 else 0.0, 0.05)
        model.save_pretrained(root / kind)
    return {kind: root / kind for kind in KINDS}


def alone(folder: Path, route: Route, run: Path, steps: int = STEPS) -> Ran:
    """The single process that a route's layouts are compared with."""
    return train_layouts(folder, route, LAYOUTS[:1], run, steps)[LAYOUTS[0].name][0]


def train_layouts(
    folder: Path, route: Route, layouts: Sequence[Layout], run: Path, steps: int = STEPS, timeout: float = 600
) -> dict[str, list[Ran]]:
    """Each layout's ranks. All layouts have the same number of ranks; they train in one group, one after the other."""
    (world,) = {layout.world for layout in layouts}
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    ranks = run_ranks(_train_all, world, folder, route, layouts, run, steps, timeout=timeout)
    return {layout.name: [rank[i] for rank in ranks] for i, layout in enumerate(layouts)}


def _train_all(rank: int, folder: Path, route: Route, layouts: Sequence[Layout], run: Path, steps: int) -> list[Ran]:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    found = []
    for i, layout in enumerate(layouts):
        _clear_sharding_prop_cache()  # it would hand the meshes of the layout before to this one's equal ones
        try:
            found.append(_train(folder, route, layout, run / str(i), steps))
        except BaseException as error:
            error.add_note(f"in layout {layout.name}, route {route.name}")
            raise
    return found


def documents() -> list[str]:
    """Texts of many lengths, so that sequences hold several."""
    return [f"Document {i}: " + "the quick brown fox " * (1 + 3 * i % 7) + f"jumps {i * i} times." for i in range(150)]


def config_of(folder: Path, route: Route, layout: Layout, run: Path, steps: int) -> Any:
    from titan_recipes.checkpoint.manager import StepCheckpoints
    from titan_recipes.config.device_defaults import apply_device_defaults
    from titan_recipes.data.loader import TextDataLoader
    from titan_recipes.models.spec import native, use_model
    from titan_recipes.train.trainer import Trainer
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.validate import Validator
    from torchtitan.config import TrainingConfig

    config = Trainer.Config(
        model_spec=native("debug"),
        hf_assets_path=str(TOKENIZER),
        dataloader=TextDataLoader.Config(documents=documents, holdout=0.1),
        validator=Validator.Config(enable=True, steps=-1),
        training=TrainingConfig(
            local_batch_size=BATCH // layout.data_ranks,
            global_batch_size=BATCH,
            seq_len=LENGTH,
            steps=steps,
            max_norm=MAX_NORM,
        ),
        optimizer=default_adamw(lr=1e-3),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        activation_checkpoint=None,
        checkpoint=StepCheckpoints.Config(enable=True),
        dump_folder=str(run),
    )
    config.metrics.log_freq = 1
    config.debug.seed = 1
    use_model(config, folder, route=route.use_model)
    if route.change is not None:
        route.change(config.model_spec)
    config.parallelism.pipeline_parallel_microbatch_size = 2
    for name, degree in layout.degrees.items():
        setattr(config.parallelism, f"{name}_degree", degree)
    for name, value in layout.settings.items():
        setattr(config.parallelism, name, value)
    apply_device_defaults(config, "cpu")
    return config


def _train(folder: Path, route: Route, layout: Layout, run: Path, steps: int) -> Ran:
    """The trainer's own steps, without what a run leaves behind."""
    import titan_recipes.train.first_loss

    trainer = config_of(folder, route, layout, run, steps).build()
    random_weights = None if PP in layout.degrees else _fingerprint(trainer.model_parts[0])
    trainer.checkpointer.load(step=-1)
    losses, norms, validation, said = [], [], [], []
    report = trainer.metrics_processor.log

    def log(step: int, loss: float, most: float, norm: float, **kwargs: Any) -> None:
        losses.append(loss)
        norms.append(norm)
        report(step, loss, most, norm, **kwargs)

    trainer.metrics_processor.log = log
    trainer.metrics_processor.log_validation = lambda loss, step, *a, **k: validation.append(loss)
    say: Callable[[str], None] = titan_recipes.train.first_loss.say
    titan_recipes.train.first_loss.say = said.append
    data = trainer.batch_generator(trainer.dataloader)
    try:
        for step in range(1, steps + 1):
            assert trainer.should_continue_training()
            trainer.step = step
            trainer.train_step(data)
        if layout.validates:
            trainer.validator.validate(trainer.model_parts, steps)
    finally:
        titan_recipes.train.first_loss.say = say
        trainer.close()
    return Ran(losses, norms, validation[-1] if validation else None, "".join(said), random_weights)


def _fingerprint(model: Any) -> float:
    """All weights, each by its place in the whole tensor."""
    total = 0.0
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        total += float(whole.detach().double().flatten() @ torch.arange(whole.numel(), dtype=torch.float64).cos())
    return total
