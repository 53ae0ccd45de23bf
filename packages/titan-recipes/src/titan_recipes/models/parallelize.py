"""TorchTitan's parallelisation of its Qwen3, made to run on gloo too."""

import logging
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.qwen3 import parallelize_qwen3

from ..moe.router import share_balance

__all__ = ["parallelize", "reduce_by_sum_on_gloo"]

log = logging.getLogger(__name__)


def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
    """TorchTitan's own parallelisation of its Qwen3, made to run on gloo."""
    model = reduce_by_sum_on_gloo(parallelize_qwen3(model, **kwargs))
    share_balance(model, **kwargs)
    return model


def reduce_by_sum_on_gloo(model: nn.Module) -> nn.Module:
    """Tell FSDP to reduce by sum on gloo, because it scales gradients with ReduceOp.PREMUL_SUM, which gloo lacks.

    Neuron and NCCL keep the default.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        log.info("swap: FSDP reduces by sum, for gloo")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model
