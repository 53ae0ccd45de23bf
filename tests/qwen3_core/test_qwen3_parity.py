"""The contract: in float32, logits and every gradient are those of Transformers' Qwen3 and Qwen3Moe (eager
attention).

max|a-b| <= 1e-5 max|b| for each tensor by itself, over the shapes and options that the published models and
their descendants use. Positions 0, 1, 17 and 63 are compared separately: position 0 alone hides a wrong RoPE.
"""

import pytest
import torch
import torch.nn.functional as F
from qwen3_core import Qwen3Config, Yarn
from qwen3_reference import assert_close, gradients, hf_model, pair, tiny, tiny_moe

YARN = Yarn(factor=4.0, original_max_position_embeddings=64)

CONFIGS = {
    "dense": tiny(),
    "tied": tiny(tie_word_embeddings=True),
    "one key head a query head": tiny(num_key_value_heads=4),
    "eight query heads a key head": tiny(num_attention_heads=8, num_key_value_heads=1),
    "32B's head_dim rule": tiny(hidden_size=80, num_attention_heads=8, head_dim=16),
    "theta 1e7": tiny(rope_theta=1e7),
    "YaRN": tiny(rope_scaling=YARN),
    "YaRN, all its fields": tiny(
        rope_scaling=Yarn(2.0, 100, beta_fast=16.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.7, truncate=False)
    ),
    "YaRN, attention factor given": tiny(rope_scaling=Yarn(4.0, 64, attention_factor=1.3)),
    "experts": tiny_moe(),
    "experts, weights not normalised": tiny_moe(norm_topk_prob=False),
    "experts, tied": tiny_moe(tie_word_embeddings=True),
    "experts, layer 1 dense": tiny_moe(num_hidden_layers=3, mlp_only_layers=(1,)),
    "experts in every second layer": tiny_moe(num_hidden_layers=4, decoder_sparse_step=2),
    "experts, more layers than experts": tiny_moe(num_hidden_layers=4, num_experts=2),
    "experts, all of them": tiny_moe(num_experts=4, num_experts_per_tok=4),
    "experts, YaRN": tiny_moe(rope_scaling=YARN),
}


def tokens(config: Qwen3Config, batch: int, length: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("batch", "length"), [(2, 64), (1, 37)])
def test_logits_and_all_gradients_equal_transformers(config: Qwen3Config, batch: int, length: int) -> None:
    ours, theirs = pair(config)
    x, targets = tokens(config, batch, length + 1).split([length, 1], dim=1)[0], tokens(config, batch, length)
    mine, reference = ours(x), theirs(input_ids=x).logits
    assert_close("logits", mine, reference)
    for position in (0, 1, 17, min(63, length - 1)):
        assert_close(f"logits at {position}", mine[:, position], reference[:, position])
    for logits in (mine, reference):
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for name, a, b in gradients(ours, theirs):
        assert_close(f"gradient of {name}", a, b)


@pytest.mark.parametrize("config", [tiny(), tiny_moe(), tiny(rope_scaling=YARN)], ids=["dense", "moe", "yarn"])
def test_packed_documents_equal_transformers_and_each_document_alone(config: Qwen3Config) -> None:
    ours, theirs = pair(config)
    lengths = (1, 23, 40)
    x = tokens(config, 1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    mine, reference = ours(x, positions), theirs(input_ids=x, position_ids=positions, use_cache=False).logits
    assert_close("logits", mine, reference)
    for n, piece, alone in zip(lengths, mine.split(lengths, dim=1), x.split(lengths, dim=1), strict=True):
        assert_close(f"document of {n}", piece, ours(alone))
    for logits in (mine, reference):
        F.cross_entropy(logits.flatten(0, 1), x.flatten()).backward()
    for name, a, b in gradients(ours, theirs):
        assert_close(f"gradient of {name}", a, b)


def test_rows_of_a_batch_may_be_packed_differently() -> None:
    ours, _ = pair(tiny())
    x = tokens(ours.config, 2, 12)
    rows = [torch.arange(12), torch.cat((torch.arange(5), torch.arange(7)))]
    both = ours(x, torch.stack(rows))
    for row, positions in enumerate(rows):
        assert_close(f"row {row}", both[row : row + 1], ours(x[row : row + 1], positions[None]))


def test_a_document_that_starts_in_the_middle_is_not_joined_to_the_one_before() -> None:
    # A chunk of a long document that goes on in the next sample: positions jump from 4 to 100, never back to
    # 0.
    ours, _ = pair(tiny())
    x = tokens(ours.config, 1, 9)
    positions = torch.cat((torch.arange(5), torch.arange(100, 104)))[None]
    packed = ours(x, positions)
    assert_close("second document", packed[:, 5:], ours(x[:, 5:], positions[:, 5:]))


def test_positions_of_one_document_give_what_no_positions_give() -> None:
    ours, _ = pair(tiny())
    x = tokens(ours.config, 1, 33)
    assert_close("logits", ours(x, torch.arange(33)[None]), ours(x))


@pytest.mark.parametrize("config", [tiny(), tiny_moe()], ids=["dense", "moe"])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is(config: Qwen3Config) -> None:
    ours, theirs = pair(config)
    x = tokens(config, 4, 64)
    exact = theirs(input_ids=x).logits

    def error(
        logits: torch.Tensor,
    ) -> float:  # of the mean square, as a flipped expert moves single entries far
        return ((logits.float() - exact).square().mean() / exact.square().mean()).sqrt().item()

    mine, reference = error(ours.bfloat16()(x)), error(theirs.bfloat16()(input_ids=x).logits)
    assert mine <= 1.25 * reference, (mine, reference)


def test_the_comparison_itself_sees_a_wrong_rope() -> None:
    # Guard of the guard: theta 1e6 against 1e4 must fail at position 63, and pass at 0.
    ours, _ = pair(tiny())
    wrong = hf_model(tiny(rope_theta=1e4))
    wrong.load_state_dict({**pair(tiny())[1].state_dict()})
    x = tokens(ours.config, 1, 64)
    mine, theirs = ours(x), wrong(input_ids=x).logits
    assert_close("position 0", mine[:, 0], theirs[:, 0])
    with pytest.raises(AssertionError, match="position 63"):
        assert_close("position 63", mine[:, 63], theirs[:, 63])
