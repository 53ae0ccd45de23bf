"""Compare what two checkpoints of one model compute: `python -m hf_ckpt_adapter.logits EXPORT SOURCE`.

This is a program of its own, so that the package itself never imports a modelling library. It uses Transformers, or
qwen3-core where that is what is installed. Both sides run in float32. The source is first rounded to the dtype that the
export has, so that a cast on export does not count as a difference. It prints one line of JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from .compare import Model
from .names.table import Layout
from .states import convert_state
from .stream import blocks

__all__ = ["compare_logits"]

TOKENS = 64
Build = Callable[[dict[str, Any], dict[str, torch.Tensor]], tuple[Any, list[str], list[str]]]


def _state(model: Model) -> tuple[dict[str, torch.Tensor], dict[str, torch.dtype]]:
    """All parts in float32, and the dtype in which each is stored."""
    state, dtypes = {}, {}
    for part in model.reading.parts:
        output = model.output(part)
        rows = [
            t.float() if t.dtype != torch.float32 else t.clone() for _, t in blocks(model.source, output, output.reads)
        ]
        state[part], dtypes[part] = torch.cat(rows).reshape(model.parts[part]), output.stored
    return state, dtypes


def _with_transformers(config: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[Any, list[str], list[str]]:
    transformers = importlib.import_module("transformers")
    cls = transformers.AutoConfig.for_model(config["model_type"]).__class__
    built = transformers.AutoModelForCausalLM.from_config(cls.from_dict({**config, "dtype": "float32"}))
    tied = bool(config.get("tie_word_embeddings"))
    result = built.load_state_dict(convert_state(state, Layout.FUSED, tied=tied).tensors, strict=False)
    missing = [n for n in result.missing_keys if not (tied and n == "lm_head.weight")]
    built.tie_weights()
    return lambda tokens: built.eval()(tokens).logits, missing, list(result.unexpected_keys)


def _with_qwen3_core(config: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[Any, list[str], list[str]]:
    core = importlib.import_module("qwen3_core")
    settings = core.Qwen3Config.from_hf(config)
    built = core.Qwen3ForCausalLM(settings)
    result = built.load_state_dict(core.from_hub(state, settings), strict=False)
    return built.eval(), list(result.missing_keys), list(result.unexpected_keys)


def compare_logits(export: str, source: str) -> dict[str, Any]:
    """Missing and unexpected names of the export, and the largest logit difference to `source`.

    Raises:
        ValueError: neither Transformers nor qwen3-core is installed, the two are not of one shape, or one of them
        routes
            with an expert bias.
    """
    one, other = Model(export), Model(source)
    try:
        differ = [part for part in one.parts.keys() & other.parts.keys() if one.parts[part] != other.parts[part]]
        if differ:
            part = min(differ)
            raise ValueError(
                f"these are two models: {part} is {list(one.parts[part])} in {export} and {list(other.parts[part])} "
                f"in {source}"
            )
        for model in (one, other):
            _refuse_bias(model)
        library, build = _library()
        state, dtypes = _state(one)
        reference = {p: t.to(dtypes[p]).float() if p in dtypes else t for p, t in _state(other)[0].items()}
        tokens = torch.randint(0, state["model.embed_tokens.weight"].shape[0], (1, TOKENS), generator=_seed())
        with torch.no_grad():
            run, missing, unexpected = build(one.config, state)
            ours = run(tokens)
            run, _, _ = build(other.config or one.config, reference)
            gap = float((ours - run(tokens)).abs().max())
    finally:
        one.close()
        other.close()
    return {
        "with": library,
        "missing": missing,
        "unexpected": unexpected,
        "difference": gap,
        "tokens": TOKENS,
    }


def _library() -> tuple[str, Build]:
    """The modelling library that is installed, and what builds a model with it."""
    builders: dict[str, Build] = {"transformers": _with_transformers, "qwen3_core": _with_qwen3_core}
    for name, build in builders.items():
        if importlib.util.find_spec(name):
            return name, build
    raise ValueError("comparing logits needs transformers or qwen3-core; neither is installed here")


def _refuse_bias(model: Model) -> None:
    """ValueError when a checkpoint routes with an expert bias: the libraries here have no place for it."""
    biased = {
        n: float(t.double().abs().max()) for n, t in model.side.items() if n.endswith("expert_bias_E") and t.any()
    }
    if biased:
        worst = max(biased, key=lambda n: biased[n])
        raise ValueError(
            f"{model.folder} routes with an expert bias (up to {biased[worst]:.6g}, {worst}). A Hugging Face model has "
            "no "
            "place for it and computes something else, so there are no logits to compare."
        )


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


if __name__ == "__main__":
    print(json.dumps(compare_logits(sys.argv[1], sys.argv[2])))
