"""Every published Qwen3 text model, one row each: `MODELS["4B"]` is a `Qwen3Config`.

The values are those of config.json in `Qwen/Qwen3-<name>` on the Hugging Face Hub (rows without a suffix: the
post-trained model of April 2025; its -Base sibling has the same sizes and 32768 positions). Needs no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from qwen3_core.config import Qwen3Config

__all__ = ["MODELS"]


def _row(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        vocab_size=151936,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        dtype="bfloat16",
        extra={"bos_token_id": 151643, "eos_token_id": 151645},
    )


def _moe(dense: Qwen3Config, experts: int, moe_intermediate: int) -> Qwen3Config:
    return replace(
        dense,
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=moe_intermediate,
        norm_topk_prob=True,
    )


def _long(config: Qwen3Config, theta: float) -> Qwen3Config:
    """The 2507 and Coder models: 256k positions by a larger theta."""
    return replace(config, rope_theta=theta, max_position_embeddings=262144)


def _debug(config: Qwen3Config) -> Qwen3Config:
    return replace(config, vocab_size=2048, max_position_embeddings=4096, dtype="float32", extra={})


_4B = _row(2560, 36, 32, 8, 9728, tied=True)
_30B_A3B = _moe(_row(2048, 48, 32, 4, 6144), 128, 768)
_235B_A22B = _moe(_row(4096, 94, 64, 4, 12288), 128, 1536)
# The dense intermediate size of the Coder models differs (5472, 8192) and is used by no layer.
_CODER_30B_A3B = replace(_30B_A3B, intermediate_size=5472)
_CODER_480B_A35B = _moe(_row(6144, 62, 96, 8, 8192), 160, 2560)


class _Table(Mapping[str, Qwen3Config]):
    """A read-only dict whose KeyError says which names there are."""

    def __init__(self, rows: dict[str, Qwen3Config]) -> None:
        self._rows = MappingProxyType(rows)

    def __getitem__(self, name: str) -> Qwen3Config:
        if name not in self._rows:
            raise KeyError(f"no Qwen3 named {name!r}; there are: {', '.join(self._rows)}")
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


MODELS: Mapping[str, Qwen3Config] = _Table(
    {
        #             hidden  layers  heads  kv  intermediate
        "debug": _debug(_row(256, 4, 4, 2, 768, tied=True)),
        "debug-moe": _debug(_moe(_row(256, 4, 4, 2, 768), 16, 192)),
        "0.6B": _row(1024, 28, 16, 8, 3072, tied=True),
        "1.7B": _row(2048, 28, 16, 8, 6144, tied=True),
        "4B": _4B,
        "4B-Instruct-2507": _long(_4B, 5e6),
        "4B-Thinking-2507": _long(_4B, 5e6),
        "8B": _row(4096, 36, 32, 8, 12288),
        "14B": _row(5120, 40, 40, 8, 17408),
        "32B": _row(5120, 64, 64, 8, 25600),
        "30B-A3B": _30B_A3B,
        "30B-A3B-Instruct-2507": _long(_30B_A3B, 1e7),
        "30B-A3B-Thinking-2507": _long(_30B_A3B, 1e7),
        "235B-A22B": _235B_A22B,
        "235B-A22B-Instruct-2507": _long(_235B_A22B, 5e6),
        "235B-A22B-Thinking-2507": _long(_235B_A22B, 5e6),
        "Coder-30B-A3B-Instruct": _long(_CODER_30B_A3B, 1e7),
        "Coder-480B-A35B-Instruct": _long(_CODER_480B_A35B, 1e7),
    }
)
