"""Contract: three packages that do not know each other list the same tensors and sizes of Qwen3.

qwen3-core's accounting has Hugging Face's names, hf-ckpt-adapter's table turns them into TorchTitan's, and
neuron-parallel's table of parameters plans with TorchTitan's.
"""

from dataclasses import replace

import pytest
from hf_ckpt_adapter import Layout, read_names, write_names
from neuron_parallel import ModelShape
from neuron_parallel.parameters import parameters
from qwen3_core import MODELS
from qwen3_core.accounting import count_parameters, forward_flops_per_token, parameter_shapes

MIXED = replace(MODELS["debug-moe"], num_hidden_layers=4, mlp_only_layers=(1,))
CONFIGS = {**MODELS, "dense and MoE layers": MIXED}


def hub_shapes(config):
    """Hub name -> shape of every tensor. qwen3-core stacks the experts that the Hub stores one by one."""
    found = {}
    for name, shape in parameter_shapes(config).items():
        if ".mlp.experts." in name:
            before, projection = name.rsplit(".", 1)
            found |= {f"{before}.{expert}.{projection}.weight": shape[1:] for expert in range(shape[0])}
        else:
            found[name] = shape
    return found


def planned(shape, moe_layers):
    """TorchTitan's name -> shape of every planned tensor. A tied head has no tensor of its own."""
    found = {}
    for layer in range(shape.num_hidden_layers):
        for row in parameters(shape, layer in moe_layers):
            if row.unit == "layer":
                found[f"layers.{layer}.{row.name}"] = row.shape
            else:
                found[row.name] = row.shape
    if shape.tie_word_embeddings:
        found["tok_embeddings.weight"] = found.pop("lm_head.weight")
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_three_lists_of_tensors_agree(name):
    config = CONFIGS[name]
    shape = ModelShape.from_hf(config.to_hf())
    reading = read_names(hub_shapes(config))
    titan = {target.name: target.shape for target in write_names(reading.parts, Layout.NATIVE_WQKV)}
    moe_layers = {layer for layer in range(config.num_hidden_layers) if config.is_moe_layer(layer)}
    assert planned(shape, moe_layers) == titan


@pytest.mark.parametrize("name", CONFIGS)
def test_two_counts_of_parameters_and_products_agree(name):
    config = CONFIGS[name]
    shape, counted = ModelShape.from_hf(config.to_hf()), count_parameters(config)
    assert (shape.parameters, shape.active_parameters) == (counted.total, counted.active)
    assert shape.flops_per_token(4096) == forward_flops_per_token(config, 4096)
