"""Transformers' Qwen3 as the reference: the same config, the same weights, the same comparison."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from qwen3_core import Qwen3Config, Qwen3ForCausalLM, Yarn, from_hub, to_hub
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

# The bound: the largest difference in a tensor, over the largest entry of the reference's.
BOUND = 1e-5

# Small, with the traps of the real ones: head_dim is not hidden / heads, expert size is no multiple of
# hidden.
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}


def tiny(**changes: object) -> Qwen3Config:
    return Qwen3Config(**{**TINY, **changes})  # type: ignore[arg-type]


def tiny_moe(**changes: object) -> Qwen3Config:
    return tiny(**{**EXPERTS, **changes})


def hf_config(config: Qwen3Config) -> Any:
    cls = transformers.Qwen3MoeConfig if config.num_experts else transformers.Qwen3Config
    return cls(**config.to_hf("transformers-5"))


def hf_model(config: Qwen3Config, attention: str = "eager") -> Any:
    """An nn.Module; untyped, since its methods are Transformers' own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_config(
            hf_config(config), attn_implementation=attention, dtype=torch.float32
        )


def pair(config: Qwen3Config, seed: int = 0) -> tuple[Qwen3ForCausalLM, Any]:
    """Ours and Transformers', with equal random weights: far from the initial ones, norms away from 1."""
    ours, theirs = Qwen3ForCausalLM(config), hf_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.1, generator=generator)
    theirs.load_state_dict(in_memory_names(to_hub(ours.state_dict()), config), strict=True)
    return ours, theirs


def in_memory_names(hub: dict[str, Tensor], config: Qwen3Config) -> dict[str, Tensor]:
    """Hub names -> the fused names that Transformers 5 has in memory: [gate; up] of all experts in one."""
    stacked = from_hub(hub, config)
    out = {name: t for name, t in stacked.items() if ".experts." not in name}
    for name in [name for name in stacked if name.endswith("experts.gate_proj")]:
        prefix = name.removesuffix("gate_proj")
        out[f"{prefix}gate_up_proj"] = torch.cat((stacked[name], stacked[f"{prefix}up_proj"]), dim=1)
        out[f"{prefix}down_proj"] = stacked[f"{prefix}down_proj"]
    if config.tie_word_embeddings:
        out["lm_head.weight"] = out["model.embed_tokens.weight"]
    return out


def gradients(ours: Qwen3ForCausalLM, theirs: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, our gradient, theirs) of every parameter, in Transformers' names."""
    mine = in_memory_names(to_hub({n: _grad(n, p) for n, p in ours.named_parameters()}), ours.config)
    named = dict(theirs.named_parameters())
    mine.pop("lm_head.weight", None) if ours.config.tie_word_embeddings else None
    assert set(mine) == set(named)
    for name, parameter in named.items():
        yield name, mine[name], _grad(name, parameter)


def _grad(name: str, parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, f"no gradient reached {name}"
    return parameter.grad


def assert_close(name: str, ours: Tensor, reference: Tensor, bound: float = BOUND) -> None:
    assert ours.shape == reference.shape, (name, ours.shape, reference.shape)
    assert ours.isfinite().all(), f"{name} is not finite"
    worst, scale = (ours - reference).abs().max().item(), reference.abs().max().item()
    assert worst <= bound * scale, f"{name}: max|a-b| = {worst:.3e} = {worst / scale:.2e} max|b|, above {bound:.0e}"


CONFIGS = [tiny(), tiny_moe(), tiny(rope_scaling=Yarn(4.0, 64))]


IDS = ["dense", "moe", "yarn"]
