"""Small checkpoints for the tests: TINY-D and TINY-M of the case list, with values one can tell apart.

Hub names and shapes only, torch alone: no Transformers, so that every test here runs with the package by
    itself.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_ckpt_adapter import (
    Layout,
    convert_state,
)
from hf_ckpt_adapter.cli import main
from safetensors.torch import save_file

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def config(moe: bool = False, **changes: Any) -> dict[str, Any]:
    """TINY-D, or TINY-M, with changes."""
    return {**CONFIG, **(MOE if moe else {}), **changes}


def state(cfg: dict[str, Any], *, head: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A state dict with Hub names, one tensor an expert; every element of it is another number (float32)."""
    d, h = cfg["hidden_size"], cfg["head_dim"]
    q, kv = cfg["num_attention_heads"] * h, cfg["num_key_value_heads"] * h
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (cfg["vocab_size"], d)}
    for n in range(cfg["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        for name, shape in {
            "input_layernorm": (d,), "post_attention_layernorm": (d,),
            "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q), "self_attn.q_norm": (h,), "self_attn.k_norm": (h,),
        }.items():  # fmt: skip
            shapes[f"{layer}{name}.weight"] = shape
        blocks = [("mlp.", cfg["intermediate_size"])]
        if cfg.get("num_experts"):
            shapes[f"{layer}mlp.gate.weight"] = (cfg["num_experts"], d)
            blocks = [(f"mlp.experts.{e}.", cfg["moe_intermediate_size"]) for e in range(cfg["num_experts"])]
        for block, width in blocks:
            shapes[f"{layer}{block}gate_proj.weight"] = (width, d)
            shapes[f"{layer}{block}up_proj.weight"] = (width, d)
            shapes[f"{layer}{block}down_proj.weight"] = (d, width)
    shapes["model.norm.weight"] = (d,)
    if head:
        shapes["lm_head.weight"] = (cfg["vocab_size"], d)
    result, start = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        result[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape).to(dtype)
        start += count
    return result


def fused(tensors: dict[str, torch.Tensor], layers: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    """The same state with the experts of some layers (all by default) in transformers 5's two 3-D tensors."""
    result = dict(tensors)
    numbers = sorted({int(n.split(".")[2]) for n in tensors if ".experts." in n})
    for layer in numbers if layers is None else layers:
        head = f"model.layers.{layer}.mlp.experts."
        count = 1 + max(int(n.split(".")[5]) for n in tensors if n.startswith(head))
        gate, up, down = (
            [result.pop(f"{head}{e}.{p}.weight") for e in range(count)] for p in ("gate_proj", "up_proj", "down_proj")
        )
        result[head + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        result[head + "down_proj"] = torch.stack(down)
    return result


def write_hub(
    folder: Path, cfg: dict[str, Any], tensors: dict[str, torch.Tensor], shards: list[list[str]] | None = None
) -> Path:
    """A Hugging Face folder, sharded with an index when `shards` names the tensors of each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cfg))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "tokenizer.json").write_text("{}")
    if shards is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total = sum(tensors[n].nbytes for n in weight_map)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    return folder


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two state dicts have the same names, dtypes, shapes and bits."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        ours, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, other[name]))
        assert torch.equal(ours, theirs), name


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def flip(folder: Path, tensor: str, byte: int, bit: int) -> str:
    """Flip a bit of a tensor; returns the name of its file."""
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        entry = json.loads(data[8 : 8 + length]).get(tensor)
        if entry:
            data[8 + length + entry["data_offsets"][0] + byte] ^= 1 << bit
            path.write_bytes(data)
            return path.name
    raise AssertionError(tensor)


def save_step(folder: Path, cfg: dict[str, Any], tensors: dict[str, torch.Tensor], **extra: Any) -> Path:
    """A step folder as TorchTitan and the trainer leave it: DCP files and `assets/`."""
    optimizer = {"state": {"norm.weight": {"exp_avg": torch.zeros(3)}}, "lr": 1e-3}
    dcp.save(
        {**tensors, **extra, "optimizer": optimizer, "train_state": {"step": 3}},
        checkpoint_id=folder,
        no_dist=True,
    )
    (folder / "assets").mkdir()
    (folder / "assets" / "config.json").write_text(json.dumps(cfg))
    (folder / "assets" / "generation_config.json").write_text("{}")
    (folder / "assets" / "tokenizer.json").write_text('{"model": 1}')
    (folder / "assets" / "recipe.json").write_text("{}")
    return folder


def native(cfg: dict[str, Any], layout: Layout = Layout.NATIVE) -> dict[str, torch.Tensor]:
    return convert_state(
        state(cfg, head=not cfg["tie_word_embeddings"]), layout, tied=cfg["tie_word_embeddings"]
    ).tensors


TITAN = [Layout.NATIVE, Layout.NATIVE_WQKV, Layout.BACKEND]


def load(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch's loader reads into NaN-poisoned tensors of the expected names; extra names are an error."""
    target = {n: torch.full_like(t, float("nan")) for n, t in like.items()}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    return target


SHARDS = 3


def sharded(folder: Path, moe: bool = False) -> Path:
    cfg = config(moe)
    names = list(state(cfg))
    size = -(-len(names) // SHARDS)
    return write_hub(folder, cfg, state(cfg), [names[i : i + size] for i in range(0, len(names), size)])
