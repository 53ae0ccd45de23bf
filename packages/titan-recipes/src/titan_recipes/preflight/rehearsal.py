"""Build a recipe at its own world size and take one step of it, in one process that has neither the ranks nor the
memory.

Process groups are torch's fake ones and tensors carry shapes only, so what runs is TorchTitan's own set-up, forward,
backward and optimizer: a degree that does not divide, a wrong shape, an operator without a shape rule fail here.
Values, kernels, compilation and communication are not rehearsed.

    rehearse(config, world_size=64).peak_gib      what torch's operators would have allocated on a rank
"""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan import trainer as titan
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_

from ..checkpoint.manager import StepCheckpoints
from ..data.loader import TextDataLoader
from ..environment import local_rank_zero
from ..train.trainer import Trainer
from ..train.watches import LossWatch, ShapeWatch
from ..upstream import (
    FakeStore,
    FakeTensorMode,
    ShardingPropagator,
    TorchDispatchMode,
    clear_sharding_prop_cache,
    tree_leaves,
    unset_fake_temporarily,
)

__all__ = ["Rehearsed", "rehearse"]

log = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True)
class Rehearsed:
    """What one rank of the run would hold."""

    parameters: int
    """Parameters on this rank, after sharding."""
    total_parameters: int
    data_ranks: int
    peak_gib: float
    """Most bytes of tensors alive in a step, once there is an optimizer's state. A device adds its runtime,
    communication buffers and fragments."""


def rehearse(config: Trainer.Config, *, world_size: int, layers: int | None = None) -> Rehearsed:
    """One step of `config` on rank 0 of `world_size` fake ranks. `layers` keeps the first so many: the others are
    alike.

    Needs the device to be set (`set_device`); operators are those of that device. Raises what the run would raise.
    """
    assert not dist.is_initialized(), "a rehearsal makes its own process group"
    config = _without_surroundings(config)
    assert config.model_spec is not None
    if layers is not None:
        model = config.model_spec.model
        config.model_spec = replace(config.model_spec, model=replace(model, layers=model.layers[:layers]))
    if config.compile.enable:
        log.warning("rehearsal: torch.compile is left out")
        config.compile = CompileConfig()
    with _fake_ranks(world_size), FakeTensorMode(allow_non_fake_inputs=True), Peak() as peak:
        trainer = _Rehearsal(config)
        highest = trainer.one_step(peak)
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        dims = trainer.parallel_dims
        return Rehearsed(
            parameters=sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters),
            total_parameters=sum(p.numel() for p in parameters),
            data_ranks=dims.dp_replicate * dims.dp_shard,
            peak_gib=highest / GIB,
        )


def _without_surroundings(config: Any) -> Trainer.Config:
    """The config without what reads or writes files, or measures."""
    bare: Trainer.Config = replace(
        config,
        dataloader=TextDataLoader.Config(documents=_one_document, holdout=0.0),
        tokenizer=_NoTokenizer.Config(),
        checkpoint=StepCheckpoints.Config(enable=False),
        validator=replace(config.validator, enable=False),
        metrics=MetricsProcessor.Config(),
        training=replace(config.training, disable_cuda_graphs=True),
        debug=replace(config.debug, seed=config.debug.seed or 0),
    )
    return bare


def _one_document() -> list[str]:
    return ["a step is taken on a batch without contents"]


class _NoTokenizer(titan.HuggingFaceTokenizer):
    """Reads no folder and knows two letters."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.HuggingFaceTokenizer.Config):
        pass

    def __init__(self, config: Any = None, *, tokenizer_path: str = "") -> None:
        self.eos_id = 0

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return [1, 0]


class _Rehearsal(Trainer):
    """The trainer as TorchTitan builds it; our hooks around a run (signals, guards, assets) are not part of a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Trainer.Config) -> None:
        titan.Trainer.__init__(self, config)
        self.shapes, self.losses = ShapeWatch(), LossWatch()

    def init_distributed(self) -> ParallelDims:
        dims = ParallelDims.from_config(self.config.parallelism, dist.get_world_size())
        with unset_fake_temporarily():
            dims.build_mesh()
        return dims

    def one_step(self, peak: "Peak") -> int:
        """Forward, backward, clipping and the optimizer's step; the most bytes that such a step of a longer run needs.

        A later step begins with the optimizer's state, which this one makes at its end: it is added to what forward and
        backward took. A later micro-batch finds gradients, as this one does where there are several.
        """
        if self.gradient_accumulation_steps > 1:
            for parameter in (p for part in self.model_parts for p in part.parameters()):
                parameter.grad = torch.zeros_like(parameter)
        peak.peak = peak.now  # set-up held whole tensors, whose weights every layout draws alike
        self._forward_backward()
        highest = peak.peak
        peak.peak = before = peak.now
        self._optimize()
        optimizing, state = peak.peak, peak.now - before
        return max(highest + state, optimizing)

    def _forward_backward(self) -> None:
        training = self.config.training
        shape = (training.local_batch_size, training.seq_len)
        batch = {name: torch.zeros(shape, dtype=torch.long) for name in ("input", "positions")}
        labels, tokens = torch.zeros(shape, dtype=torch.long), torch.tensor(training.seq_len)
        self.forward_backward_step(input_dict=batch, labels=labels, global_valid_tokens=tokens)

    def _optimize(self) -> None:
        clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self.optimizers.step()
        self.lr_schedulers.step()


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    make_mesh = DeviceMesh.__init__

    def make_real_mesh(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():  # ranks in a mesh are read by value
            make_mesh(mesh, *args, **kwargs)

    DeviceMesh.__init__ = make_real_mesh  # type: ignore[method-assign, assignment]
    multithreaded = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)  # as TorchTitan sets it: meshes are a thread's own
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with local_rank_zero():
            yield
    finally:
        dist.destroy_process_group()
        DeviceMesh.__init__ = make_mesh  # type: ignore[method-assign]
        clear_sharding_prop_cache()  # it would hand this rehearsal's meshes to the next one's equal ones
        torch.autograd.set_multithreading_enabled(multithreaded)


class Peak(TorchDispatchMode):
    """Sums the storages that operators make, while they are alive, and remembers the highest sum (bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._counting = True
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_
        self._lock = ShardingPropagator._fake_mode_lock

    def __enter__(self) -> "Peak":
        def resize(storage: torch.UntypedStorage, size: int) -> None:  # how FSDP frees and gets back what it gathers
            self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        ShardingPropagator._fake_mode_lock = (
            self._not_counted()
        )  # DTensor works out shapes on tensors of the whole's size
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._fake_mode_lock = self._lock

    def _not_counted(self) -> Any:
        peak = self

        class Pause:
            def __enter__(self) -> None:
                peak._counting = False

            def __exit__(self, *error: object) -> None:
                peak._counting = True

        return Pause()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors come by here again
        out = func(*args, **(kwargs or {}))
        if not self._counting:
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key)
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self.peak = max(self.peak, self.now)
        self._sizes[key] = size

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
