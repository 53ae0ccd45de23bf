"""Contract: what a device dictates is set on any recipe and each change is said; what it cannot do is
refused by name.
"""

from dataclasses import dataclass
from dataclasses import replace as replaced

import pytest
from qwen3_core import MODELS
from titan_recipes.config.device_defaults import DEVICE_DEFAULTS, apply_device_defaults
from titan_recipes.errors import UserError
from titan_recipes.models.spec import native
from titan_recipes.train.trainer import Trainer
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.common import Linear


def config():
    return Trainer.Config(model_spec=native("debug"), optimizer=default_adamw(lr=1e-3))


def value(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("device", DEVICE_DEFAULTS)
def test_every_default_of_the_table_is_a_field_that_is_set_and_reported_once(device):
    ours = config()
    lines = apply_device_defaults(ours, device)
    for default in DEVICE_DEFAULTS[device]:
        assert value(ours, default.field) == default.value
        if value(config(), default.field) != default.value:
            assert any(line.startswith(f"{default.field} = {default.value!r}") for line in lines)
    assert apply_device_defaults(ours, device) == []


def test_neuron_gets_no_cuda_graphs_no_nccl_recorder_its_own_compiler_and_time_to_compile():
    ours = config()
    apply_device_defaults(ours, "neuron")
    assert ours.training.disable_cuda_graphs is True
    assert ours.comm.trace_buf_size == 0
    assert ours.compile.backend == "neuron" and ours.compile.enable is False
    # Fused AdamW is registered for neuron, and most foreach operators are not: the recipe's choice stays.
    assert ours.optimizer.implementation == config().optimizer.implementation == "fused"
    assert (ours.comm.init_timeout_seconds, ours.comm.train_timeout_seconds) == (7200, 1800)


def test_a_time_limit_that_the_user_set_stays_on_neuron():
    ours = config()
    ours.comm.init_timeout_seconds = ours.comm.train_timeout_seconds = 250
    apply_device_defaults(ours, "neuron")
    assert (ours.comm.init_timeout_seconds, ours.comm.train_timeout_seconds) == (250, 250)


@pytest.mark.parametrize("kind", ["Float8Linear", "MXFP8Linear", "NVFP4Linear", "Float8GroupedExperts"])
def test_low_precision_layers_are_refused_on_neuron_by_name(kind):
    """TorchTitan's own classes exist only with TorchAO: these have their names and base."""
    layer = dataclass(kw_only=True, slots=True)(type("Config", (Linear.Config,), {"__qualname__": f"{kind}.Config"}))
    ours = config()
    block = ours.model_spec.model.layers[1]
    block.feed_forward = replaced(block.feed_forward, w1=layer(in_features=8, out_features=8))
    with pytest.raises(UserError, match=rf"layers\.1\.feed_forward\.w1 is a {kind}: float8, MX and NVFP4"):
        apply_device_defaults(ours, "neuron")
    apply_device_defaults(ours, "cuda")


def test_every_published_model_passes_the_check():
    for name in MODELS:
        ours = config()
        ours.model_spec = native(name)
        apply_device_defaults(ours, "neuron")
