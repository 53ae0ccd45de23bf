"""Contract of route 3: nki-moe's operators replace exactly the modules that were asked for and compute the same; an
override that does nothing, two that meet, sizes or software that the kernels do not have are one error each before a
rank starts.

First losses and gradients of whole models, on ranks and on nki-sim, are in tests/integration/test_routes.py.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from qwen3_core import Qwen3Config
from titan_recipes.errors import UserError
from titan_recipes.models.attention import SDPAttention
from titan_recipes.models.spec import native, swaps, use_model
from titan_recipes.moe import kernels
from titan_recipes.moe.dispatchers import use_dispatcher
from titan_recipes.moe.kernels import NkiExperts, NkiRoPE, check_overrides, kernel
from titan_recipes.moe.layer import SameDtypeExperts
from titan_recipes.moe.router import BalancedRouter, use_balance_loss
from titan_recipes.train.trainer import Trainer
from torchtitan.config import apply_overrides
from torchtitan.config.override import derive, override
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

SIZES = Qwen3Config(
    vocab_size=320,
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=128,
    rope_theta=1e6,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    norm_topk_prob=True,
)
DENSE = replace(SIZES, num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0)


def config(*imports, model=SIZES, **parallelism):
    made = Trainer.Config(model_spec=native(model))
    made.override.imports = list(imports)
    for name, degree in parallelism.items():
        setattr(made.parallelism, name, degree)
    return made


def replaced(made, kind):
    """Names of the nodes of a kind after TorchTitan applied the overrides."""
    made = copy.deepcopy(made)
    apply_overrides(made.override, made)
    return [name.removeprefix("model_spec.model.") for name, *_ in made.traverse(kind)]


class OtherSDPA(SDPAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(SDPAttention.Config):
        pass


@override(target=SDPAttention.Config)
def other_sdpa(node):
    return derive(node, OtherSDPA.Config)


@override(target=SDPAttention.Config, fqns=["nowhere.*"])
def idle(node):
    return node


HERE = __name__


def test_kernels_replace_what_their_globs_name_and_compose_with_an_attention_of_ones_own():
    made = config(kernel("experts", "layers.[12].*"), kernel("rope", "layers.0.*"), f"{HERE}.other_sdpa")
    lines = check_overrides(made, "cpu")
    assert [line.partition(" (")[0].partition(" replaces ")[2] for line in lines] == [
        "2 GroupedExperts",
        "1 CosSinRoPE",
        "3 SDPAttention",
    ]
    assert replaced(made, NkiExperts.Config) == [f"layers.{i}.moe.routed_experts.inner_experts" for i in (1, 2)]
    assert replaced(made, NkiRoPE.Config) == ["layers.0.attention.rope"]
    assert len(replaced(made, OtherSDPA.Config)) == 3
    apply_overrides(made.override, made)
    assert "titan_recipes.moe.kernels.NkiExperts for torchtitan.models.common.moe.GroupedExperts (2 x)" in swaps(
        made.model_spec
    )
    experts = made.model_spec.model.layers[1].moe.routed_experts.inner_experts
    assert (experts.dim, experts.hidden_dim, experts.num_experts) == (256, 256, 4)
    assert experts.param_init.keys() == {"w1_EFD", "w2_EDF", "w3_EFD"}


def test_one_override_is_registered_for_each_operator_and_globs_however_often_it_is_asked_for():
    assert kernel("experts", "layers.1.*") == kernel("experts", "layers.1.*") != kernel("experts", "layers:1:*x")
    assert kernel("experts") == "titan_recipes.moe.kernels.experts"  # what one types on a command line
    assert len({kernel("experts", "a.b"), kernel("experts", "a", "b"), kernel("rope", "a.b")}) == 3
    with pytest.raises(UserError, match=r"no operator 'norm'.*experts, rope"):
        kernel("norm")


@pytest.mark.parametrize(
    "entry, model, message",
    [
        (
            kernel("experts", "layers.9.*"),
            SIZES,
            r"(?s)named 'layers\.9\.\*'.*has 3, layers\.0\.moe.* to layers\.2\.moe",
        ),
        (kernel("experts"), DENSE, r"(?s)for GroupedExperts, and the config has none.*mixture of experts"),
        (f"{HERE}.idle", SIZES, r"idle replaces nothing"),  # anybody's override
        (
            "titan_recipes.moe.kernels.nothing",
            SIZES,
            r"names no registered.*there are titan_recipes\.moe\.kernels\.experts, titan_recipes\.moe\.kernels\.rope",
        ),
        ("no_such_module.kernel", SIZES, "could not be imported"),
    ],
)
def test_an_override_that_replaces_nothing_is_an_error_that_says_what_there_is(entry, model, message):
    with pytest.raises(UserError, match=message):
        check_overrides(config(entry, model=model), "cpu")


def test_two_overrides_that_meet_are_an_error():
    with pytest.raises(UserError, match=r"both claim node .*layers\.1\."):
        check_overrides(config(kernel("experts"), kernel("experts", "layers.1.*")), "cpu")


def test_sizes_that_the_kernels_refuse_are_an_error_with_the_numbers_where_kernels_would_run(monkeypatch):
    narrow = config(kernel("experts"), model=replace(SIZES, moe_intermediate_size=192))
    (line,) = check_overrides(narrow, "cpu")
    assert "by torch on cpu; Trainium would refuse layers.0." in line and "hidden (F) 192" in line
    with pytest.raises(UserError, match=r"layers\.0\.moe.*hidden \(F\) 192.*nearest: 256"):
        check_overrides(narrow, "neuron", planned=True)
    monkeypatch.setenv("NKI_MOE_BACKEND", "sim")
    with pytest.raises(UserError, match=r"hidden \(F\) 192"):
        check_overrides(narrow, "cpu")
    check_overrides(config(kernel("experts"), expert_parallel_degree=2, tensor_parallel_degree=2), "cpu")
    with pytest.raises(UserError, match=r"tp 2, ep 1.*hidden \(F\) 128"):  # without EP, TP divides F
        check_overrides(config(kernel("experts"), tensor_parallel_degree=2), "cpu")
    with pytest.raises(UserError, match="head_dim 514"):
        check_overrides(config(kernel("rope"), model=replace(SIZES, head_dim=514)), "neuron", planned=True)


def test_rope_under_tensor_parallelism_is_refused_where_it_would_get_dtensors():
    made = config(kernel("rope"), tensor_parallel_degree=2, spmd_backend="partial_dtensor")
    with pytest.raises(UserError, match="use spmd_types"):
        check_overrides(made, "cpu")


def test_a_backend_that_is_not_there_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setenv("NKI_MOE_BACKEND", "nki")
    with pytest.raises(UserError, match=r"(?s)NKI_MOE_BACKEND=nki asks.*NKI_MOE_BACKEND=torch.*--route native"):
        check_overrides(config(kernel("experts")), "cpu")
    check_overrides(config(kernel("experts")), "neuron", planned=True)  # planned on a laptop
    monkeypatch.delenv("NKI_MOE_BACKEND")
    with pytest.raises(UserError, match="provider='nkilib' is a choice between kernels"):  # never torch in its place
        check_overrides(config((kernel("experts"), {"provider": "nkilib"})), "cpu")
    with pytest.raises(UserError, match=r"dim \(D\) 256: nki-library takes multiples of 512"):
        check_overrides(config((kernel("experts"), {"provider": "nkilib"})), "neuron", planned=True)


def test_a_trainer_checks_its_overrides_before_it_builds(monkeypatch):
    with pytest.raises(UserError, match="replaces nothing"):
        config(kernel("experts", "nowhere")).build()


def test_a_route_takes_kernels_in_or_out_and_keeps_what_a_recipe_chose():
    made = config(f"{HERE}.other_sdpa")
    use_dispatcher(made.model_spec, "capacity", capacity_factor=2.0)
    use_balance_loss(made.model_spec, 0.01)
    use_model(made, route="kernels")
    assert made.override.imports == [f"{HERE}.other_sdpa", kernel("experts")]
    use_model(made, route="native")
    assert made.override.imports == [f"{HERE}.other_sdpa"]
    made.override.imports = [(kernel("experts", "layers.1.*"), {"provider": "nkilib"})]
    use_model(made, replace(SIZES, num_experts=8), route="kernels")
    assert made.override.imports == [(kernel("experts", "layers.1.*"), {"provider": "nkilib"})]
    for _, node, _, _ in made.traverse(RoutedExperts.Config):
        assert (node.token_dispatcher.capacity_factor, node.token_dispatcher.num_experts) == (2.0, 8)
    assert {node.balance_coefficient for _, node, _, _ in made.traverse(BalancedRouter.Config)} == {0.01}


def test_nki_experts_compute_what_torchtitans_do():
    torch.manual_seed(0)
    stock = SameDtypeExperts.Config(dim=256, hidden_dim=128, num_experts=4).build()
    for p in stock.parameters():
        torch.nn.init.normal_(p, std=0.1)
    ours = kernels.experts(GroupedExperts.Config(dim=256, hidden_dim=128, num_experts=4)).build()
    ours.load_state_dict(stock.state_dict())
    counts_E = torch.tensor([5, 0, 30, 12])
    x_RD = torch.randn(50, 256)  # three rows more than were routed
    results = []
    for experts in (stock, ours):
        x = x_RD.clone().requires_grad_()
        y_RD = experts(x, counts_E)[:47]
        y_RD.square().sum().backward()
        results.append([y_RD, x.grad[:47], *(p.grad for p in experts.parameters())])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("rows", [1, 2])
def test_nki_rope_turns_as_torchtitans_does_at_each_documents_positions(rows):
    torch.manual_seed(0)
    node = CosSinRoPE.Config(dim=32, max_seq_len=64, theta=1e4, scaling="yarn", rope_factor=4.0, original_seq_len=16)
    positions = torch.cat([torch.arange(10), torch.arange(6)]).expand(rows, -1)
    for where in (positions, None):
        results = []
        for part in (node.build(), kernels.rope(node).build()):
            torch.manual_seed(1)
            q, k = (torch.randn(rows, 16, heads, 32, requires_grad=True) for heads in (4, 2))
            turned = part(q, k, where)
            sum(t.sin().sum() for t in turned).backward()
            results.append([*turned, q.grad, k.grad])
        for theirs, mine in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
