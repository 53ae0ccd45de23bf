"""The contract: one row for each published Qwen3, with its published sizes and counts."""

import pytest
from qwen3_core import MODELS
from qwen3_core.accounting import count_parameters
from qwen3_reference import hf_config, transformers

# Billions, from the model cards: total, without embeddings, and active where there are experts.
CARDS = {
    "0.6B": ("0.6", "0.44", None),
    "1.7B": ("1.7", "1.4", None),
    "4B": ("4.0", "3.6", None),
    "4B-Instruct-2507": ("4.0", "3.6", None),
    "4B-Thinking-2507": ("4.0", "3.6", None),
    "8B": ("8.2", "6.95", None),
    "14B": ("14.8", "13.2", None),
    "32B": ("32.8", "31.2", None),
    "30B-A3B": ("30.5", "29.9", "3"),
    "30B-A3B-Instruct-2507": ("30.5", "29.9", "3"),
    "30B-A3B-Thinking-2507": ("30.5", "29.9", "3"),
    "235B-A22B": ("235", "234", "22"),
    "235B-A22B-Instruct-2507": ("235", "234", "22"),
    "235B-A22B-Thinking-2507": ("235", "234", "22"),
    "Coder-30B-A3B-Instruct": ("30.5", "29.9", "3"),
    "Coder-480B-A35B-Instruct": ("480", None, "35"),
}


def test_the_cards_cover_the_table() -> None:
    assert set(CARDS) | {"debug", "debug-moe"} == set(MODELS)


@pytest.mark.parametrize("name", CARDS)
def test_counts_round_to_the_published_figures(name: str) -> None:
    count = count_parameters(MODELS[name])
    for value, published in zip((count.total, count.non_embedding, count.active), CARDS[name], strict=True):
        if published is not None:
            digits = len(published.partition(".")[2])
            assert f"{value / 1e9:.{digits}f}" == published


@pytest.mark.parametrize("name", MODELS)
def test_counts_equal_transformers_modules_exactly(name: str) -> None:
    import torch

    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(hf_config(MODELS[name]))
    assert sum(p.numel() for p in theirs.parameters()) == count_parameters(MODELS[name]).total


@pytest.mark.parametrize(
    ("name", "theta", "length"),
    [
        ("4B", 1e6, 40960),
        ("4B-Instruct-2507", 5e6, 262144),
        ("4B-Thinking-2507", 5e6, 262144),
        ("30B-A3B", 1e6, 40960),
        ("30B-A3B-Instruct-2507", 1e7, 262144),
        ("30B-A3B-Thinking-2507", 1e7, 262144),
        ("235B-A22B", 1e6, 40960),
        ("235B-A22B-Instruct-2507", 5e6, 262144),
        ("Coder-30B-A3B-Instruct", 1e7, 262144),
        ("Coder-480B-A35B-Instruct", 1e7, 262144),
    ],
)
def test_theta_and_length_are_the_published_ones(name: str, theta: float, length: int) -> None:
    assert (MODELS[name].rope_theta, MODELS[name].max_position_embeddings) == (theta, length)


def test_only_the_three_small_ones_tie_their_embeddings() -> None:
    tied = {name for name, config in MODELS.items() if config.tie_word_embeddings}
    assert tied == {"debug", "0.6B", "1.7B", "4B", "4B-Instruct-2507", "4B-Thinking-2507"}


def test_the_480b_coder_has_160_experts() -> None:
    config = MODELS["Coder-480B-A35B-Instruct"]
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (160, 8, 2560)


def test_a_name_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(KeyError, match=r"7B.*0\.6B.*Coder-480B-A35B-Instruct"):
        MODELS["7B"]
