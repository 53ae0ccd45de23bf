"""Contract: a parallel layout that cannot work is refused before a rank starts, with the reason and what to do instead."""

from dataclasses import replace
from typing import Any

import pytest
from qwen3_core import Qwen3Config
from titan_recipes.balance import use_balance_loss
from titan_recipes.errors import UserError
from titan_recipes.preflight import check_layout
from titan_recipes.simple_fsdp import simple_fsdp
from titan_recipes.spec import model_spec
from titan_recipes.trainer import Trainer

UNTIED = Qwen3Config(
    vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, intermediate_size=96, max_position_embeddings=128, rope_theta=1e6,
)  # fmt: skip


def config(route: str = "native", model: Qwen3Config = UNTIED, **parallelism: Any) -> Trainer.Config:
    found = Trainer.Config(model_spec=model_spec(model, route=route))
    found.training.seq_len = 64
    for name, value in parallelism.items():
        setattr(found.parallelism, name, value)
    return found


REFUSED = [
    ({"context_parallel_degree": 2, "spmd_backend": "partial_dtensor"}, "spmd_types' alone", "spmd_backend spmd_types"),
    ({"context_parallel_degree": 2, "context_parallel_load_balancer": "ptrr"}, "block masks", "headtail or None"),
    ({"context_parallel_degree": 3}, "multiple of 6", "nearest: 60"),
    ({"pipeline_parallel_degree": 5}, "cannot be greater than", "pipeline_parallel_degree"),
    ({"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "Interleaved1F1B"}, "cannot be greater", "less_layers"),
    ({"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 1}, "exactly 1 stage per rank", "layers_per_stage"),
    ({"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "DualPipeV"}, "loss on the first rank", "ZBVZeroBubble"),
    ({"tensor_parallel_degree": 4}, "does not divide the 2 KV heads", "valid degrees: [1, 2]"),
]  # fmt: skip


@pytest.mark.parametrize(("parallelism", "reason", "instead"), REFUSED)
def test_a_layout_that_cannot_work_is_refused_with_reason_and_alternative(parallelism, reason, instead):
    with pytest.raises(UserError) as refused:
        check_layout(config(**parallelism))
    assert reason in str(refused.value) and instead in str(refused.value)


def test_a_schedule_that_cannot_validate_is_refused_with_validation_alone():
    asked = config(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="ZBVZeroBubble",
        pipeline_parallel_first_stage_less_layers=0,
    )
    asked.parallelism.pipeline_parallel_last_stage_less_layers = 0
    asked.model_spec = model_spec(replace(UNTIED, num_hidden_layers=4))
    check_layout(asked)
    asked.validator.enable = True
    with pytest.raises(UserError, match=r"(?s)as validation does.*validator.no-enable"):
        check_layout(asked)


def test_pipeline_parallel_with_tied_weights_is_refused_on_both_routes():
    for route in ("native", "transformers"):
        with pytest.raises(UserError, match=r"(?s)each train a copy.*tie_word_embeddings=False"):
            check_layout(config(route, replace(UNTIED, tie_word_embeddings=True), pipeline_parallel_degree=2))


@pytest.mark.parametrize(
    ("parallelism", "reason"),
    [
        ({"spmd_backend": "partial_dtensor"}, "knows 'spmd_types' alone"),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, "always splits the sequence"),
    ],
)
def test_what_torchtitans_transformers_backend_lacks_is_refused_and_the_native_route_has_it(parallelism, reason):
    with pytest.raises(UserError, match=rf"(?s){reason}.*--route native"):
        check_layout(config("transformers", **parallelism))
    check_layout(config("native", **parallelism))


@pytest.mark.parametrize("axis", ["context", "pipeline"])
def test_simple_fsdp_is_refused_with_context_and_pipeline_parallel(axis):
    asked = config(spmd_backend="partial_dtensor", **{f"{axis}_parallel_degree": 2})
    asked.model_spec = simple_fsdp(asked.model_spec)
    with pytest.raises(UserError, match=rf"{axis}_parallel 2"):
        check_layout(asked)


@pytest.mark.parametrize(
    ("parallelism", "reason"),
    [
        ({"pipeline_parallel_degree": 2}, "routing of all layers"),
        (
            {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"},
            "needs parallelism.spmd_backend 'spmd_types'",
        ),
    ],
)
def test_the_auxiliary_loss_is_refused_where_routers_cannot_share_it(parallelism, reason):
    asked = config(model=replace(UNTIED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), **parallelism)
    check_layout(asked)  # without the loss it works
    use_balance_loss(asked.model_spec, 0.001)
    with pytest.raises(UserError, match=reason):
        check_layout(asked)


def test_what_works_is_not_refused():
    for route in ("native", "transformers"):
        check_layout(config(route, context_parallel_degree=2, pipeline_parallel_degree=2, tensor_parallel_degree=2))
        check_layout(config(route, context_parallel_degree=4, context_parallel_load_balancer=None))
