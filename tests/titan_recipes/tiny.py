"""A native model small enough to run whole in a test."""

from qwen3_core import Qwen3Config
from titan_recipes.models.spec import native
from torchtitan.protocols.model_spec import ModelSpec


def tiny_spec() -> ModelSpec:
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=96, max_position_embeddings=128, rope_theta=1e6,
    )  # fmt: skip
    return native(config, document_mask="causal")
