"""Contract: with the gather dispatcher a mixture of experts in any layout has the loss and gradients of one process,
with any experts and any activation checkpointing, and no operator ever sees a new shape; the capacity dispatcher drops
what does not fit, no more, and counts it once.

Float32: sums in another order differ by 1e-6 of a gradient's largest entry here, the bound is 1e-5.
"""

from functools import partial
from typing import Any

import moe_ranks
import pytest
import torch
from moe_ranks import Run, assert_same, batch, train_each
from qwen3_core import Qwen3Config
from ranks import run_ranks
from titan_recipes.errors import UserError
from titan_recipes.models.activation_checkpoint import SaveLinears
from titan_recipes.models.spec import native, transformers, use_model
from titan_recipes.moe.dispatchers import CapacityTokenDispatcher, GatherTokenDispatcher, use_dispatcher
from titan_recipes.moe.kernels import NkiExperts
from titan_recipes.moe.router import BalancedRouter, use_balance_loss
from titan_recipes.train.trainer import Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import MoE, RoutedExperts

EP = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}
TP = {"tensor_parallel_degree": 2}
POLICIES = {"selective": SelectiveAC.Config(), "full": FullAC.Config(), "save-linears": SaveLinears.Config()}


def use_kernels(spec: Any) -> None:
    for _, config, _, _ in spec.model.traverse(RoutedExperts.Config):
        old = config.inner_experts
        config.inner_experts = NkiExperts.Config(
            dim=old.dim, hidden_dim=old.hidden_dim, num_experts=old.num_experts, param_init=old.param_init
        )


def use(spec: Any, name: str, kernels: bool = False, **options: Any) -> None:
    use_dispatcher(spec, name, **options)
    if kernels:
        use_kernels(spec)


STOCK, GATHER, BLOCKS = (
    partial(use, name="all-to-all"),
    partial(use, name="gather"),
    partial(use, name="gather", block=16),
)
KERNELS, ALL_FIT = partial(use, name="gather", kernels=True), partial(use, name="capacity", capacity_factor=2.0)
TIGHT = partial(use, name="capacity", capacity_factor=0.75)
ALONE = {
    "stock": {"degrees": {}, "prepare": STOCK},
    "default": {"degrees": {}},
    "blocks": {"degrees": {}, "prepare": BLOCKS},
    "kernels": {"degrees": {}, "prepare": KERNELS},
    "capacity": {"degrees": {}, "prepare": TIGHT},  # nothing to exchange, nothing to drop
}
ON_TWO = {
    "EP": {"degrees": EP},
    "EP, partial_dtensor": {"degrees": {**EP, "spmd_backend": "partial_dtensor"}},
    "EP, blocks": {"degrees": EP, "prepare": BLOCKS},
    "EP, kernels": {"degrees": EP, "prepare": KERNELS},
    "EP, kernels, full": {"degrees": EP, "prepare": KERNELS, "policy": POLICIES["full"]},
    "EP, all-to-all": {"degrees": EP, "prepare": STOCK},
    "EP, capacity that fits all": {"degrees": EP, "prepare": ALL_FIT},
    "TP": {"degrees": TP},
    "TP x EP": {"degrees": {**TP, "expert_parallel_degree": 2}},
    "TP x EP, no sequence parallel": {
        "degrees": {**TP, "expert_parallel_degree": 2, "enable_sequence_parallel": False}
    },
    **{f"EP, {name}": {"degrees": EP, "policy": policy} for name, policy in POLICIES.items()},
}
ON_FOUR = {
    "EP of 4": {"degrees": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 4}},
    "FSDP x EP": {"degrees": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}},
    "FSDP x TP x EP, blocks": {
        "degrees": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "expert_parallel_degree": 2},
        "prepare": BLOCKS,
    },
}
DROPPING = {
    "plain": {"degrees": EP, "prepare": TIGHT},
    **{name: {"degrees": EP, "prepare": TIGHT, "policy": policy} for name, policy in POLICIES.items()},
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(train_each, 1, ALONE)[0]


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_ranks(train_each, 2, ON_TWO | DROPPING)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    return run_ranks(train_each, 4, ON_FOUR)


@pytest.mark.parametrize("case", ALONE)
def test_on_one_rank_it_has_torchtitans_loss_and_gradients(alone: dict[str, Any], case: str) -> None:
    loss, gradients, _ = alone[case]
    assert loss == pytest.approx(alone["stock"][0], rel=1e-6)
    assert_same(gradients, alone["stock"][1])


@pytest.mark.parametrize("case", [*ON_TWO, *ON_FOUR])
def test_in_any_layout_it_has_the_loss_and_gradients_of_one_rank(
    alone: dict[str, Any], case: str, request: pytest.FixtureRequest
) -> None:
    """The gradients are those of experts, router and all else: nothing is averaged twice or left out, and scores have
    their gradient.
    """
    ranks = [r[case] for r in request.getfixturevalue("on_two" if case in ON_TWO else "on_four")]
    degrees = (ON_TWO | ON_FOUR)[case]["degrees"]
    data_ranks = degrees.get("data_parallel_shard_degree", 1)
    loss = sum(loss for loss, _, _ in ranks) * data_ranks / len(ranks)  # tensor-parallel ranks have the same rows
    assert loss == pytest.approx(alone["stock"][0], rel=1e-6)
    for _, gradients, _ in ranks:
        assert_same(gradients, alone["stock"][1])


def test_what_the_capacity_drops_is_counted_once_and_logged_for_all_ranks(
    alone: dict[str, Any], on_two: list[dict[str, Any]]
) -> None:
    """Case 058: a forward pass that activation checkpointing runs again counts nothing."""
    shares = {name: [rank[name][2]["dropped_share"] for rank in on_two] for name in DROPPING}
    assert 0.2 < shares["plain"][0] < 0.5  # a quarter at least: the capacity is three quarters of all choices
    assert {share for pair in shares.values() for share in pair} == {shares["plain"][0]}
    assert on_two[0]["EP, capacity that fits all"][2] == {"dropped_share": 0.0} and on_two[0]["EP"][2] == {}
    for name in POLICIES:
        assert_same(on_two[0][name][1], on_two[0]["plain"][1])


def exchange(rank: int, world: int, factor: float, block: int) -> tuple[Any, ...]:
    """The capacity dispatcher alone, expert e multiplying by e + 2: outputs, kept choices by brute force, and what it
    counted.
    """
    from torch.distributed.device_mesh import init_device_mesh

    experts, tokens, choices = 8, 20, 2
    generator = torch.Generator().manual_seed(rank)
    x_TD, scores_TK = torch.randn(tokens, 4, generator=generator), torch.rand(tokens, choices, generator=generator)
    ids_TK = (torch.rand(tokens, experts, generator=generator) + torch.linspace(1, 0, experts)).topk(choices).indices
    dispatcher = CapacityTokenDispatcher.Config(
        num_experts=experts, top_k=choices, capacity_factor=factor, block=block
    ).build()
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
    rows_RD, counts_e, metadata = dispatcher.dispatch(x_TD, scores_TK, ids_TK, torch.empty(0))
    mine = torch.arange(experts // world) + rank * experts // world
    factor_R = torch.zeros(len(rows_RD))
    factor_R[: int(counts_e.sum())] = torch.repeat_interleave(mine + 2.0, counts_e)
    out_TD = dispatcher.combine(rows_RD * factor_R[:, None], metadata, x_TD)
    capacity, sent, expected_TD, dropped = (
        -int(-factor * tokens * choices // world),
        [0] * world,
        torch.zeros_like(x_TD),
        0,
    )
    for t in range(tokens):
        for k in range(choices):
            expert = int(ids_TK[t, k])
            to = expert * world // experts
            sent[to] += 1
            if sent[to] > capacity:
                dropped += 1
            else:
                expected_TD[t] += scores_TK[t, k] * (expert + 2) * x_TD[t]
    seen = dispatcher.take_seen()
    assert seen is not None and dispatcher.take_seen() is None  # it starts anew
    return out_TD.numpy(), expected_TD.numpy(), seen.tolist(), [dropped, tokens * choices], tuple(rows_RD.shape)


@pytest.mark.parametrize("factor, block", [(1.0, 1), (0.6, 8)])
def test_the_capacity_dispatcher_drops_the_choices_that_do_not_fit_and_no_other(factor: float, block: int) -> None:
    for out, expected, seen, counted, shape in run_ranks(exchange, 2, 2, factor, block):
        assert abs(out - expected).max() < 1e-5
        assert seen == counted and seen[0] > 0
        assert shape == ((40, 4) if block == 1 else (-(-24 // 8) * 8 + 4 * 7 // 8 * 8, 4))


class Shapes(TorchDispatchMode):
    """Every operator with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, *(out if isinstance(out, tuple) else (out,))) if isinstance(t, torch.Tensor)]
        self.seen.add((func, *(t.shape for t in tensors)))
        return out


def new_shapes(rank: int, degrees: dict[str, Any], prepare: Any, steps: int) -> tuple[int, int, int]:
    """Operators with shapes after step 1 that step 1 had not; in step 1; and different routings seen."""
    run = Run(degrees, prepare, layers=1)
    first: set[Any] = set()
    routings: set[tuple[int, ...]] = set()
    for module in run.model.modules():
        if isinstance(module, BalancedRouter):
            module.register_forward_hook(lambda _, args, out: routings.add(tuple(out[1].flatten().tolist())))
    new: set[Any] = set()
    for step in range(steps):
        with Shapes() as shapes:
            run.step(*batch(seed=step))
        if step == 0:
            first = shapes.seen
        new |= shapes.seen - first
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                parameter.grad = None
                if "router" in name:
                    local = getattr(parameter, "to_local", lambda p=parameter: p)()
                    local += torch.randn(local.shape, generator=torch.Generator().manual_seed(step))
    return len(new), len(first), len(routings)


@pytest.mark.parametrize("degrees, prepare", [({}, GATHER), ({}, BLOCKS), (EP, GATHER)], ids=["local", "blocks", "EP"])
def test_over_100_steps_of_changing_routing_no_operator_sees_a_new_shape(degrees: dict[str, Any], prepare: Any) -> None:
    for new, first, routings in run_ranks(new_shapes, 2 if degrees else 1, degrees, prepare, 100):
        assert new == 0
        assert first > 100 and routings == 100


def test_torchtitans_exchange_does_see_new_shapes() -> None:
    """What the gather dispatcher is for: if this fails, TorchTitan's has changed and ours may go."""
    assert all(new > 10 for new, _, _ in run_ranks(new_shapes, 2, EP, STOCK, 3))


@pytest.mark.parametrize("make", [native, transformers])
def test_a_spec_has_the_gather_dispatcher_until_another_is_chosen(make: Any) -> None:
    def kinds(spec: Any) -> set[Any]:
        return {type(c.token_dispatcher)._owner for _, c, _, _ in spec.model.traverse(RoutedExperts.Config)}

    spec = make(Qwen3Config(**moe_ranks.OPTIONS | {"num_hidden_layers": 1}))
    assert kinds(spec) == {GatherTokenDispatcher}
    use_dispatcher(spec, "capacity", capacity_factor=1.5)
    assert kinds(spec) == {CapacityTokenDispatcher}
    with pytest.raises(UserError, match="choose one of gather, capacity, all-to-all"):
        use_dispatcher(spec, "padded")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"does not take these options.*capacity_factor"):
        use_dispatcher(spec, "gather", capacity_factor=2.0)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("capacity", {"capacity_factor": 0}, "capacity_factor is 0"),
        ("capacity", {"capacity_factor": float("nan")}, "capacity_factor is nan"),
        ("capacity", {"capacity_factor": float("inf")}, "capacity_factor is inf"),
        ("gather", {"block": 0}, "block is 0"),
        ("capacity", {"block": 1.5}, "block is 1.5"),
    ],
)
def test_options_that_no_run_can_have_are_refused_by_the_recipe_and_by_the_model(
    name: Any, options: dict[str, Any], words: str
) -> None:
    spec = native(Qwen3Config(**moe_ranks.OPTIONS | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match=words):
        use_dispatcher(spec, name, **options)
    kind = {"gather": GatherTokenDispatcher, "capacity": CapacityTokenDispatcher}[name]
    with pytest.raises(UserError, match=words):
        kind.Config(num_experts=4, top_k=2, **options).build()


def test_a_model_without_a_mixture_has_no_dispatcher_and_no_auxiliary_loss_to_set() -> None:
    """Nothing that is asked for is passed over."""
    none = {"num_hidden_layers": 1, "num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0}
    dense = native(Qwen3Config(**moe_ranks.OPTIONS | none))
    with pytest.raises(UserError, match=r"nothing to dispatch.*no mixture of experts"):
        use_dispatcher(dense, "gather")
    with pytest.raises(UserError, match=r"no router to balance.*no mixture of experts"):
        use_balance_loss(dense, 0.001)
    use_balance_loss(dense, 0)


@pytest.mark.parametrize("coefficient", [-0.1, float("nan"), float("inf")])
def test_a_coefficient_that_no_run_can_have_is_refused(coefficient: float) -> None:
    spec = native(Qwen3Config(**moe_ranks.OPTIONS | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match=f"coefficient is {coefficient}"):
        use_balance_loss(spec, coefficient)


@pytest.mark.parametrize("change", [{"route": "transformers"}, {"model": "debug-moe"}], ids=["route", "model"])
def test_another_route_or_model_keeps_the_recipes_dispatcher_and_auxiliary_loss(change: dict[str, Any]) -> None:
    spec = native(Qwen3Config(**moe_ranks.OPTIONS | {"num_hidden_layers": 1}))
    use_dispatcher(spec, "capacity", capacity_factor=1.5, block=128)
    use_balance_loss(spec, 0.25)
    config = Trainer.Config(model_spec=spec)
    use_model(config, **change)
    layers = [layer for _, layer, _, _ in config.model_spec.model.traverse(MoE.Config)]
    assert layers
    for layer in layers:
        assert layer.router.balance_coefficient == 0.25
        assert layer.routed_experts.token_dispatcher == CapacityTokenDispatcher.Config(
            num_experts=layer.num_experts, top_k=layer.router.top_k, capacity_factor=1.5, block=128
        )
