"""The contract: nki_moe.rope is TorchTitan's and Transformers' half-split rotation; backward turns back by the cos and
sin that forward used; each token has its own position; kernel and torch agree to the bit.
"""

import nki_moe
import pytest
import torch
from nki_moe.rotary import op
from torch import Tensor


def angles(positions: Tensor, H: int) -> tuple[Tensor, Tensor]:
    theta = positions[..., None] / 1e6 ** (torch.arange(0, H, 2) / H)
    theta = torch.cat([theta, theta], dim=-1)
    return theta.cos(), theta.sin()


def heads(B: int, L: int, N: int, M: int, H: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, L, n, H, generator=g).to(dtype).requires_grad_() for n in (N, M))  # type: ignore[return-value]


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


@pytest.fixture(params=["torch", "sim"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NKI_MOE_BACKEND", request.param)
    return request.param


@pytest.mark.parametrize("lnc", ["1", "2"])
def test_is_the_half_split_rotation_with_its_gradient(backend: str, lnc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    q, k = heads(2, 145, 4, 2, 32, torch.float32)
    positions = torch.cat([torch.arange(100), torch.arange(45)]).expand(2, -1).clone()  # two documents
    positions[1] = torch.arange(145)
    cos, sin = angles(positions, 32)
    found = nki_moe.rope(q, k, cos, sin)
    c, s = cos[:, :, None], sin[:, :, None]
    wanted = tuple(x * c + rotate_half(x) * s for x in (q, k))
    gradients = [
        torch.autograd.grad([t.square().sum() * (1 + i) for i, t in enumerate(pair)], [q, k])
        for pair in (found, wanted)
    ]
    torch.testing.assert_close((*found, *gradients[0]), (*wanted, *gradients[1]))


def test_one_cache_for_the_batch_is_its_expansion(backend: str) -> None:
    q, k = heads(2, 32, 2, 1, 16, torch.bfloat16)
    cos, sin = angles(torch.arange(32), 16)
    each = nki_moe.rope(q, k, cos.expand(2, -1, -1), sin.expand(2, -1, -1))
    assert all(torch.equal(a, b) for a, b in zip(nki_moe.rope(q, k, cos, sin), each, strict=True))


def test_kernel_and_torch_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = heads(1, 200, 4, 2, 64, torch.bfloat16)
    cos, sin = angles(torch.arange(200), 64)
    results = []
    for backend in ("torch", "sim"):
        monkeypatch.setenv("NKI_MOE_BACKEND", backend)
        out = nki_moe.rope(q, k, cos, sin)
        results.append((*out, *torch.autograd.grad([t.float().square().sum() for t in out], [q, k])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_backward_undoes_forward(backend: str) -> None:
    q, k = heads(1, 16, 2, 1, 8, torch.float32)
    cos, sin = angles(torch.arange(16), 8)
    out = nki_moe.rope(q, k, cos, sin)
    back = torch.autograd.grad(out, [q, k], [t.detach() for t in out])
    torch.testing.assert_close(back, (q.detach(), k.detach()))


def test_opcheck_and_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_MOE_BACKEND", "torch")
    q, k = heads(2, 8, 2, 1, 8, torch.float32)
    cos, sin = angles(torch.arange(8).expand(2, -1), 8)
    torch.library.opcheck(op.turn, (q, k, cos, sin, False))
    compiled = torch.compile(nki_moe.rope, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(q, k, cos, sin), nki_moe.rope(q, k, cos, sin), strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cos": torch.zeros(9, 8)}, r"expected \(B, L, N, H\)"),
        ({"k": torch.zeros(1, 8)}, r"k \(1, 8\), .*expected \(B, L, N, H\)"),
        (
            {"q": torch.zeros(2, 8, 2, 7), "k": torch.zeros(2, 8, 1, 7), "cos": torch.zeros(8, 7)},
            "head dim 7 must be even",
        ),
        ({"q": torch.zeros(2, 8, 2, 8, dtype=torch.bfloat16)}, "of one dtype"),
        ({n: torch.zeros(2, 8, 1, 8, dtype=torch.float64) for n in "qk"}, "float64.*bfloat16 or float32"),
        ({"cos": torch.zeros(8, 8, dtype=torch.int64)}, "cos is torch.int64"),
        ({"k": torch.zeros(2, 8, 1, 8, device="meta")}, "k on meta, .*one device"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], words: str) -> None:
    arguments = {"q": torch.zeros(2, 8, 2, 8), "k": torch.zeros(2, 8, 1, 8), "cos": torch.zeros(8, 8)} | change
    with pytest.raises(ValueError, match=words):
        nki_moe.rope(*arguments.values(), torch.zeros_like(arguments["cos"], dtype=torch.float32))


def test_no_tokens_and_heads_that_lie_as_they_like(backend: str) -> None:
    q, k = heads(1, 4, 3, 2, 8, torch.float32)
    cos, sin = angles(torch.arange(4), 8)
    none = nki_moe.rope(q[:, :0], k[:, :0], cos[:0], sin[:0])
    assert [t.shape for t in none] == [(1, 0, 3, 8), (1, 0, 2, 8)]
    turned = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k)]
    found, wanted = nki_moe.rope(*turned, cos.T.contiguous().T, sin), nki_moe.rope(q, k, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    gradients = [
        torch.autograd.grad([t.sum() for t in out], given) for out, given in ((found, turned), (wanted, (q, k)))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
