"""Random checkpoints in real sizes for the conversion benchmarks, written shard by shard with the reference
writer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["QWEN3_06B", "moe", "write_model"]

# Sizes from https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def moe(layers: int, experts: int, *, hidden: int = 1024, width: int = 384, vocab: int = 32000) -> dict[str, Any]:
    """A mixture-of-experts config; top-8 routing as in Qwen3-30B-A3B."""
    sizes = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 64),
        "num_key_value_heads": max(1, hidden // 256),
        "head_dim": min(128, hidden),
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "moe_intermediate_size": width,
        "intermediate_size": 4 * width,
        "norm_topk_prob": True,
    }
    return {**QWEN3_06B, **sizes}


def shapes(cfg: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as the Hub has them."""
    d, h = cfg["hidden_size"], cfg["head_dim"]
    q, kv = cfg["num_attention_heads"] * h, cfg["num_key_value_heads"] * h
    yield "model.embed_tokens.weight", (cfg["vocab_size"], d)
    for n in range(cfg["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        yield from ((f"{layer}{norm}.weight", (d,)) for norm in ("input_layernorm", "post_attention_layernorm"))
        yield from ((f"{layer}self_attn.{norm}.weight", (h,)) for norm in ("q_norm", "k_norm"))
        yield f"{layer}self_attn.q_proj.weight", (q, d)
        yield f"{layer}self_attn.k_proj.weight", (kv, d)
        yield f"{layer}self_attn.v_proj.weight", (kv, d)
        yield f"{layer}self_attn.o_proj.weight", (d, q)
        blocks, width = ["mlp."], cfg["intermediate_size"]
        if cfg.get("num_experts"):
            yield f"{layer}mlp.gate.weight", (cfg["num_experts"], d)
            blocks, width = (
                [f"mlp.experts.{e}." for e in range(cfg["num_experts"])],
                cfg["moe_intermediate_size"],
            )
        for block in blocks:
            yield f"{layer}{block}gate_proj.weight", (width, d)
            yield f"{layer}{block}up_proj.weight", (width, d)
            yield f"{layer}{block}down_proj.weight", (d, width)
    yield "model.norm.weight", (d,)
    if not cfg["tie_word_embeddings"]:
        yield "lm_head.weight", (cfg["vocab_size"], d)


def write_model(folder: Path, cfg: dict[str, Any], shards: int, seed: int = 0) -> int:
    """Write a bf16 model of random weights in about `shards` files of equal size; returns its tensor
    bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(cfg))
    wanted = list(shapes(cfg))
    total = sum(2 * torch.Size(s).numel() for _, s in wanted)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in wanted:
        if filled >= total / shards * len(groups) and len(groups) < shards:
            groups.append({})
        groups[-1][name] = shape
        filled += 2 * torch.Size(shape).numel()
    weight_map = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        save_file(
            {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in group.items()},
            folder / file,
        )
        weight_map.update(dict.fromkeys(group, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    return total
