"""Contract: the auxiliary loss is Transformers' over all tokens of a micro-batch, with its gradients, in any layout; it
is counted once under recomputation, and averaged over the micro-batches of a step. Expert bias, when a recipe asks for
it, moves alike with and without recomputation.
"""

from functools import partial
from typing import Any

import pytest
import torch
from moe_ranks import Run, assert_same, batch, train_each
from ranks import run_ranks
from titan_recipes.moe.router import BalancedRouter, use_balance_loss
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import MoE

COEFFICIENT = 0.5  # large: a gradient that is wrong by a part of it is seen
BALANCED = partial(use_balance_loss, coefficient=COEFFICIENT)
EP, TP = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}, {"tensor_parallel_degree": 2}
POLICIES = {"plain": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
ON_TWO = {
    "FSDP": {"degrees": {"data_parallel_shard_degree": 2}},
    "replicated": {"degrees": {"data_parallel_replicate_degree": 2}},
    "EP, full": {"degrees": EP, "policy": FullAC.Config()},
    "EP, partial_dtensor": {"degrees": {**EP, "spmd_backend": "partial_dtensor"}},
    "TP": {"degrees": TP},
    "TP x EP": {"degrees": {**TP, "expert_parallel_degree": 2}},
}
for _case in ON_TWO.values():
    _case["prepare"] = BALANCED


def by_transformers(micro_batches: int) -> tuple[float, dict[str, Any]]:
    """One process: the cross entropy and, from the gates' own outputs, Transformers' function.

    Its mean value, all gradients.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    run = Run({}, micro_batches=micro_batches)
    logits: list[torch.Tensor] = []
    for module in run.model.modules():
        if isinstance(module, BalancedRouter):
            module.gate.register_forward_hook(lambda _, args, out: logits.append(out.flatten(0, 1)))
    tokens_BL, labels_BL = batch()
    values = []
    for tokens, labels in zip(tokens_BL.chunk(micro_batches), labels_BL.chunk(micro_batches), strict=True):
        logits.clear()
        out = run.model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
        loss = (
            torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum") / labels_BL.numel()
        )
        value = load_balancing_loss_func(tuple(logits), 8, 2)
        (loss + COEFFICIENT * value / micro_batches).backward()
        values.append(value.item())
    return sum(values) / len(values), run.gradients()


def on_one(rank: int) -> dict[str, Any]:
    """Everything that needs one rank, in one process: each starts cold."""
    ours = {"degrees": {}, "prepare": BALANCED}
    cases = {name: {**ours, "policy": policy} for name, policy in POLICIES.items()}
    cases |= {"accumulated": {**ours, "micro_batches": 2}, "off": {"degrees": {}}}
    return {
        "transformers": by_transformers(1),
        "transformers, accumulated": by_transformers(2),
        **{f"bias, {name}": bias_after_a_step(policy) for name, policy in POLICIES.items()},
        "without gradients": without_gradients(),
        **train_each(rank, cases),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(on_one, 1)[0]


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_ranks(train_each, 2, ON_TWO)


@pytest.mark.parametrize("policy", POLICIES)
def test_value_and_gradients_are_transformers_and_recomputation_counts_nothing(
    alone: dict[str, Any], policy: str
) -> None:
    """Case 058."""
    (expected_value, expected), (_, gradients, logged) = alone["transformers"], alone[policy]
    assert logged["balance_loss"] == pytest.approx(expected_value, rel=1e-6)
    assert expected_value > 2.0  # 2 experts a token: the least there is
    assert_same(gradients, expected)


def test_under_accumulation_it_is_the_mean_of_the_micro_batches(alone: dict[str, Any]) -> None:
    (expected_value, expected), (_, gradients, logged) = alone["transformers, accumulated"], alone["accumulated"]
    assert logged["balance_loss"] == pytest.approx(expected_value, rel=1e-6)
    assert_same(gradients, expected)


@pytest.mark.parametrize("case", ON_TWO)
def test_in_any_layout_it_is_that_of_all_tokens_together(
    alone: dict[str, Any], on_two: list[dict[str, Any]], case: str
) -> None:
    expected_value, expected = alone["transformers"]
    for rank in on_two:
        _, gradients, logged = rank[case]
        assert logged["balance_loss"] == pytest.approx(expected_value, rel=1e-6)
        assert_same(gradients, expected)


def without_gradients() -> Any:
    run = Run({}, BALANCED)
    run.model.eval()
    run.model(batch()[0], torch.arange(16).expand(4, 16))
    with torch.no_grad():
        run.model.train()(batch()[0], torch.arange(16).expand(4, 16))
    return next(m.balance for m in run.model.modules() if isinstance(m, BalancedRouter)).take_value()


def test_it_is_off_by_default_and_without_gradients_counts_nothing(alone: dict[str, Any]) -> None:
    assert alone["off"][2] == {} and alone["without gradients"] is None


def bias_after_a_step(policy: Any) -> tuple[list[Any], float]:
    """Expert biases that TorchTitan's hook makes of a step with two micro-batches, and what is left of the counts."""
    from torchtitan.components.optimizer import register_moe_load_balancing_hook

    def prepare(spec: Any) -> None:
        for _, config, _, _ in spec.model.traverse(MoE.Config):
            config.load_balance_coeff = 1e-3

    hooks: list[Any] = []

    class Optimizers:
        def register_step_pre_hook(self, hook: Any) -> None:
            hooks.append(hook)

    run = Run({}, prepare, policy, micro_batches=2)
    register_moe_load_balancing_hook(Optimizers(), [run.model], run.dims)
    run.step(*batch(), micro_batches=2)
    hooks[0]()
    layers = [m for m in run.model.modules() if isinstance(m, MoE)]
    return [m.expert_bias_E.tolist() for m in layers], sum(float(m.tokens_per_expert_E.sum()) for m in layers)


def test_an_expert_bias_moves_alike_with_and_without_recomputation_and_its_counts_start_anew(
    alone: dict[str, Any],
) -> None:
    """Case 058: TorchTitan counts a recomputed pass twice, and halves what it counted before it moves the bias."""
    plain, left = alone["bias, plain"]
    assert left == 0 and any(any(bias) for bias in plain)
    assert all(alone[f"bias, {name}"] == (plain, 0) for name in POLICIES)
