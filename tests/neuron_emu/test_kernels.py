"""Operators on the emulated device give CPU's bits, refuse what a device refuses, and are counted on the right line."""

import math

import neuron_emu
import pytest
import torch
from neuron_emu import counts
from torch import nn


def here() -> int:
    """The caller's line."""
    import inspect

    return inspect.currentframe().f_back.f_lineno


def found(rule: str) -> list[tuple[str, int]]:
    """(detail, line) of a rule's counts in this file."""
    return [
        (row.detail, row.line) for row in counts(rule) if row.module.endswith("test_kernels") or __file__ in row.module
    ]


def test_a_model_trains_to_cpus_bits() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 8)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        x, y = torch.randn(4, 16).to(device), torch.randint(8, (4,)).to(device)
        values = []
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    assert losses("neuron") == losses("cpu")
    assert losses("cpu")[0] > losses("cpu")[-1]


def test_views_share_memory_and_writes_show() -> None:
    base = torch.zeros(4, 6, device="neuron")
    view = base.t()[1:3].unsqueeze(0)
    view.fill_(7)
    assert view.is_set_to(view) and view.data_ptr() == base.data_ptr() + 4
    assert base.cpu().sum().item() == 7 * 8
    base.resize_(2, 2)
    out = torch.empty(0, device="neuron")
    torch.add(base, 1, out=out)
    assert out.shape == (2, 2) and out.untyped_storage().nbytes() == 16


def test_storages_are_freed_and_taken_again() -> None:
    tensor = torch.ones(1000, device="neuron")
    before = torch.neuron.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert torch.neuron.memory_allocated() == before - 4000
    tensor.untyped_storage().resize_(4000)
    tensor.copy_(torch.arange(1000.0))
    assert tensor.sum().item() == 999 * 500


def test_nothing_on_the_host_can_read_device_memory_by_its_address() -> None:
    from emu_ranks import start

    code = """
import ctypes
t = torch.ones(4, device="neuron")
print(ctypes.cast(t.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])
"""
    ((status, out, _),) = start(code)
    assert status == -11 and out == ""


def test_item_in_a_layer_is_a_host_wait_on_its_line() -> None:
    x = torch.ones(3, device="neuron")
    x.sum().item()
    line = here() - 1
    assert found("host-wait") == [("item", line)]


def test_a_copy_to_the_host_waits_but_not_into_pinned_memory() -> None:
    x = torch.ones(3, device="neuron")
    pinned = torch.empty(3, pin_memory=True)
    assert pinned.is_pinned() and not torch.empty(3).is_pinned()
    pinned.copy_(x, non_blocking=True)
    assert found("host-wait") == []
    x.cpu()
    assert [detail for detail, _ in found("host-wait")] == ["copy to host"]


def test_an_operator_that_is_not_registered_is_a_fallback() -> None:
    x = torch.ones(3, 3, device="neuron")
    torch.linalg.inv_ex(x + torch.eye(3, device="neuron"))
    line = here() - 1
    assert ("aten::linalg_inv_ex", line) in found("cpu-fallback")
    assert all(detail != "aten::add" for detail, _ in found("cpu-fallback"))


def test_float64_is_refused_where_it_is_made() -> None:
    with pytest.raises(RuntimeError, match=r"64-bit floating point.*\n  at .*test_kernels.py"):
        torch.ones(3, dtype=torch.float64, device="neuron")
    with pytest.raises(RuntimeError, match="64-bit floating point"):
        torch.ones(3, device="neuron").double()
    with neuron_emu.relaxed("float64"):
        assert torch.ones(3, dtype=torch.float64, device="neuron").sum().item() == 3


def test_a_tensor_left_on_cpu_is_refused_and_a_scalar_is_not() -> None:
    x = torch.ones(3, device="neuron")
    with pytest.raises(RuntimeError, match="at least two, neuron:0 and cpu"):
        x + torch.ones(3)
    assert (x + torch.tensor(2.0)).sum().item() == 9


def test_another_index_is_no_device_of_a_process_that_has_one_core() -> None:
    with pytest.raises(RuntimeError, match="device-index"):
        torch.ones(1, device="neuron:7")
    with pytest.raises(ValueError, match="Valid range is 0 to 3"):
        torch.neuron.set_device(7)


def test_int64_arithmetic_has_32_bits() -> None:
    big = torch.tensor([2**31 - 1], device="neuron")
    assert (big + 1).item() == -(2**31)
    assert [detail for detail, _ in found("int64-wraps")] == ["aten::add"]
    neuron_emu.set_rule("int64-wraps", "off")
    assert (big + 1).item() == 2**31


def test_sort_goes_over_the_host() -> None:
    torch.ones(4, device="neuron").argsort()
    line = here() - 1
    assert {(detail, line) for detail, line in found("host-round-trip")} == {("aten::sort", line)}


def test_indexing_waits_twice_unless_the_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    x, at = torch.arange(4.0, device="neuron"), torch.tensor([1, 3], device="neuron")
    monkeypatch.delenv("TORCH_NEURONX_SKIP_OP_PRECONDITIONS", raising=False)
    x.index_select(0, at)
    assert [row.amount for row in counts("bounds-check")] == [2]
    with pytest.raises(IndexError, match="out of range"):
        x.index_select(0, at + 9)
    monkeypatch.setenv("TORCH_NEURONX_SKIP_OP_PRECONDITIONS", "1")
    neuron_emu.reset_counts()
    assert x.index_select(0, at).tolist() == [1, 3]
    assert counts("bounds-check") == []
    assert all(math.isnan(v) for v in x.index_select(0, at + 9).tolist())
    assert [row.detail for row in counts("out-of-range-index")] == ["aten::index_select"]


def test_select_backward_is_reported_on_its_forward_line() -> None:
    x = torch.ones(3, 4, device="neuron", requires_grad=True)
    y = x[1] * 2
    line = here() - 1
    y.sum().backward()
    assert found("select-backward") == [("aten::select_backward", line)]


def test_grouped_mm_takes_blocks_of_128() -> None:
    x = torch.ones(256, 16, device="neuron", dtype=torch.bfloat16)
    w = torch.ones(2, 16, 16, device="neuron", dtype=torch.bfloat16)
    offsets = torch.tensor([128, 256], dtype=torch.int32, device="neuron")
    assert torch._grouped_mm(x, w, offs=offsets)[0, 0].item() == 16
    assert [row.amount for row in counts("grouped-mm-copy")] == [2 * 16 * 16 * 2]
    with pytest.raises(ValueError, match="found an offset of 100"):
        torch._grouped_mm(x, w, offs=torch.tensor([100, 256], dtype=torch.int32, device="neuron"))


def test_signatures_are_counted_once() -> None:
    x = torch.ones(5, 7, 3, device="neuron")
    neuron_emu.reset_counts()
    for _ in range(3):
        x * 2
        line = here() - 1
    rows = [row for row in counts("new-signature") if row.detail == "aten::mul"]
    assert [(row.line, row.amount) for row in rows] == [(line, 1)]


def test_attention_takes_cpus_bits_and_counts_what_has_no_fused_kernel() -> None:
    def run(device: str, length: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = ((torch.randn(1, 2, length, 16)).to(device).requires_grad_() for _ in range(3))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y.square().sum().backward()
        return [t.detach().cpu() for t in (y, q.grad, k.grad, v.grad)]

    assert all(torch.equal(a, b) for a, b in zip(run("neuron", 512), run("cpu", 512), strict=True))
    assert counts("slow-attention") == []
    assert all(torch.equal(a, b) for a, b in zip(run("neuron", 100), run("cpu", 100), strict=True))
    assert [row.detail for row in counts("slow-attention")] == ["query length 100, no multiple of 128"]


def test_autocast_lowers_matmuls_and_keeps_softmax() -> None:
    x = torch.ones(2, 2, device="neuron")
    with torch.autocast("neuron", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).softmax(0).dtype == torch.float32


def test_every_kind_of_rule_that_the_device_meets_is_a_row() -> None:
    import re
    from pathlib import Path

    source = Path(neuron_emu.__file__).parent
    text = "\n".join(file.read_text() for file in (*source.glob("csrc/*.cpp"), *source.glob("*.py")))
    met = set(re.findall(r'(?:meet|note|mode_of)\(\s*"([a-z0-9-]+)"', text))
    names = {rule.name for rule in neuron_emu.RULES}
    assert met <= names, met - names
    assert {rule.point for rule in neuron_emu.RULES} == set(range(1, 19))
