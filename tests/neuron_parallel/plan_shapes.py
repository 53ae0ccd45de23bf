"""Published sizes that the tests plan for, from their config.json."""

from neuron_parallel import Cluster, ModelShape, ParallelPlan, instance

_QWEN3 = {"vocab_size": 151936, "head_dim": 128}
QWEN3_4B = ModelShape(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
    **_QWEN3,
)
QWEN3_8B = ModelShape(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    **_QWEN3,
)
QWEN3_30B = ModelShape(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    **_QWEN3,
)
QWEN3_235B = ModelShape(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
    **_QWEN3,
)
TRN2 = Cluster(instance("trn2.48xlarge"))


def plan(cores: int = 64, **fields: int) -> ParallelPlan:
    """A resolved plan."""
    return ParallelPlan(**fields).resolve(cores)  # type: ignore[arg-type]
