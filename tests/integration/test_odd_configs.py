"""Contract of two readers of config.json: qwen3-core and hf-ckpt-adapter give one answer, or both refuse. (210.)"""

import json
from typing import Any

import pytest
from hf_ckpt_adapter.config import check_config, load_config, rope_theta, tied
from hf_ckpt_adapter.sizes import Sizes
from qwen3_core import MODELS, Qwen3Config

BASE = MODELS["debug"].to_hf() | {"tie_word_embeddings": False}
MOE = MODELS["debug-moe"].to_hf()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
REFUSED = "refused"


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def text(config: dict[str, Any]) -> str:
    return json.dumps(config)


# The file, and what both say: (tied, theta), or that they refuse it.
TABLE: dict[str, tuple[str, Any]] = {
    "as published": (text(BASE), (False, 1e6)),
    "tied": (text(BASE | {"tie_word_embeddings": True}), (True, 1e6)),
    "tied by a nested setting only": (
        text(without(BASE, "tie_word_embeddings") | {"text_config": {"tie_word_embeddings": True}}),
        (False, 1e6),
    ),
    "no word about tying": (text(without(BASE, "tie_word_embeddings")), (False, 1e6)),
    "theta in rope_parameters": (
        text(
            without(BASE, "rope_theta", "rope_scaling")
            | {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}
        ),
        (False, 5e6),
    ),
    "theta in rope_scaling": (
        text(without(BASE, "rope_theta") | {"rope_scaling": YARN | {"rope_theta": 5e6}}),
        (False, 5e6),
    ),
    "two thetas that agree": (text(BASE | {"rope_scaling": YARN | {"rope_theta": 1e6}}), (False, 1e6)),
    "YaRN": (text(BASE | {"rope_scaling": YARN}), (False, 1e6)),
    "num_local_experts": (text(without(MOE, "num_experts") | {"num_local_experts": 16}), (False, 1e6)),
    "two thetas": (text(BASE | {"rope_scaling": YARN | {"rope_theta": 5e6}}), REFUSED),
    "no theta": (text(without(BASE, "rope_theta")), REFUSED),
    "a key twice": (text(BASE)[:-1] + ', "rope_theta": 5e6}', REFUSED),
    "another architecture": (text(BASE | {"model_type": "llama"}), REFUSED),
    "a word that ties": (text(BASE | {"tie_word_embeddings": "yes"}), REFUSED),
    **{
        f"rope type {kind}": (text(BASE | {"rope_scaling": {"rope_type": kind, "factor": 2.0}}), REFUSED)
        for kind in ("linear", "dynamic", "longrope", "llama3")
    },
}


@pytest.mark.parametrize("name", TABLE)
def test_both_readers_say_the_same(name, tmp_path):
    content, expected = TABLE[name]
    (tmp_path / "config.json").write_text(content)
    moe = json.loads(content)["model_type"] == "qwen3_moe"

    def core():
        config = Qwen3Config.from_hf(tmp_path)
        return config.tie_word_embeddings, config.rope_theta

    def adapter():
        config = load_config(tmp_path)
        sizes = {
            n: config[n]
            for n in vars(Sizes())
            if n in config and (moe or n not in ("num_experts", "moe_intermediate_size"))
        }
        if moe:
            sizes["num_experts"] = 16
        check_config(config, Sizes(**sizes), vocab_size=config["vocab_size"])
        return tied(config), rope_theta(config)

    for reader in (core, adapter):
        if expected == REFUSED:
            with pytest.raises(ValueError):
                reader()
        else:
            assert reader() == expected, reader.__name__
