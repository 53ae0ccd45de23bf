"""The contract: experts are chosen in float32 whatever the model's dtype, every token gets the weighted sum
of exactly its experts, and empty or overfull experts change neither values nor gradients.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from qwen3_core import Qwen3Config
from qwen3_core.moe import MixtureOfExperts, Router, grouped_experts
from qwen3_reference import assert_close, tiny_moe
from torch import Tensor


def layer(config: Qwen3Config, seed: int = 0) -> MixtureOfExperts:
    moe = MixtureOfExperts(config, grouped_experts)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(0, 0.3, generator=generator)
    return moe


def one_token_at_a_time(moe: MixtureOfExperts, x_TD: Tensor) -> Tensor:
    """The definition, in plain loops."""
    weights_TK, experts_TK = moe.gate(x_TD)
    out = []
    for x_D, weights_K, experts_K in zip(x_TD, weights_TK, experts_TK.tolist(), strict=True):
        said = []
        for weight, e in zip(weights_K, experts_K, strict=True):
            w = moe.experts
            said.append(weight * (w.down_proj[e] @ (F.silu(w.gate_proj[e] @ x_D) * (w.up_proj[e] @ x_D))))
        out.append(torch.stack(said).sum(dim=0))
    return torch.stack(out)


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """torch fills what it allocates uninitialised with NaN, so that a read of an unwritten row shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("routing", ["spread", "all to one pair", "all to the last pair"])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_values_and_gradients_are_those_of_the_definition(tokens: int, routing: str) -> None:
    moe = layer(tiny_moe())
    x_TD = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1))
    if routing != "spread":
        x_TD[:, 0] = 50.0
        with torch.no_grad():
            moe.gate.weight[:, 0] = torch.linspace(0, 5, 8) if "last" in routing else -torch.linspace(0, 5, 8)
        assert moe.gate(x_TD)[1].unique().numel() == 2
    x_TD.requires_grad_()

    def results(out_TD: Tensor) -> list[Tensor]:
        inputs = [x_TD, *moe.parameters()]
        return [out_TD, *torch.autograd.grad(out_TD.square().sum(), inputs)]

    names = ["output", "gradient of x", *(f"gradient of {n}" for n, _ in moe.named_parameters())]
    mine, reference = results(moe(x_TD[None])[0]), results(one_token_at_a_time(moe, x_TD))
    for name, a, b in zip(names, mine, reference, strict=True):
        assert_close(name, a, b)


def test_no_tokens_give_no_rows() -> None:
    assert layer(tiny_moe())(torch.zeros(1, 0, 64)).shape == (1, 0, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_nearer_than_a_bfloat16_step_are_told_apart(dtype: torch.dtype) -> None:
    # Expert 5 scores 1 + 2^-10, expert 2 scores 1: equal once rounded to bfloat16, where the lower index
    # would win.
    config = tiny_moe(hidden_size=2, num_experts_per_tok=1)
    router = Router(config).to(dtype)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[2] = torch.tensor([1.0, 0.0])
        router.weight[5] = torch.tensor([1.0, 2.0**-10])
    for _ in range(10):
        _, experts_TK = router(torch.ones(4, 2, dtype=dtype))
        assert (experts_TK == 5).all()


def test_softmax_and_top_k_are_float32_in_a_bfloat16_model() -> None:
    seen: dict[str, torch.dtype] = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = func.overloadpacket.__name__
            if name in ("_softmax", "topk"):
                seen[name] = args[0].dtype
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        weights_TK, _ = layer(tiny_moe()).bfloat16().gate(torch.ones(4, 64, dtype=torch.bfloat16))
    assert seen == {"_softmax": torch.float32, "topk": torch.float32}
    assert weights_TK.dtype == torch.bfloat16


@pytest.mark.parametrize("normalised", [True, False])
def test_weights_add_up_to_one_exactly_if_the_config_says_so(normalised: bool) -> None:
    router = layer(tiny_moe(norm_topk_prob=normalised)).gate
    x_TD = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    weights_TK, experts_TK = router(x_TD)
    probabilities_TE = F.linear(x_TD, router.weight).softmax(dim=-1)
    chosen_TK = probabilities_TE.gather(1, experts_TK)
    assert torch.equal(experts_TK, probabilities_TE.topk(2).indices)
    expected_TK = chosen_TK / chosen_TK.sum(dim=-1, keepdim=True) if normalised else chosen_TK
    assert_close("weights", weights_TK, expected_TK)
    assert (weights_TK.sum(dim=-1) < 0.999).any() != normalised


def test_every_call_of_the_experts_sees_rows_sorted_by_expert() -> None:
    moe = layer(tiny_moe())
    x_TD = torch.randn(33, 64, generator=torch.Generator().manual_seed(3))
    _, experts_TK = moe.gate(x_TD)

    def check(x_RD: Tensor, ends_E: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        starts = [0, *ends_E.tolist()]
        for e in range(8):
            rows = x_RD[starts[e] : starts[e + 1]]
            assert torch.equal(rows, x_TD[(experts_TK == e).any(dim=1)])  # in the order of the tokens
        return grouped_experts(x_RD, ends_E, gate, up, down)

    moe._run = check
    moe(x_TD[None])
