"""The contract: `init_weights` draws from the distribution that Transformers draws from, tensor by tensor."""

from collections.abc import Callable

import pytest
import torch
from qwen3_core import Qwen3Config, Qwen3ForCausalLM, to_hub
from qwen3_reference import hf_model, in_memory_names, tiny, tiny_moe


@pytest.mark.parametrize("std", [0.02, 0.1])
@pytest.mark.parametrize("make", [tiny, tiny_moe], ids=["dense", "moe"])
def test_each_tensor_has_transformers_initial_distribution(make: Callable[..., Qwen3Config], std: float) -> None:
    config = make(initializer_range=std, vocab_size=2048)
    torch.manual_seed(0)
    theirs = dict(hf_model(config).named_parameters())
    model = Qwen3ForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(1))
    ours = in_memory_names(to_hub(model.state_dict()), config)
    assert set(ours) == set(theirs)
    for name, parameter in theirs.items():
        mine, reference = ours[name].flatten(), parameter.detach().flatten()
        if name.endswith("norm.weight"):
            assert torch.equal(mine, reference), name
            continue
        # Two-sample Kolmogorov-Smirnov; 1.95 is its 0.1 % point, and seeds are fixed.
        both = torch.cat((mine, reference)).sort().values
        below = [torch.searchsorted(x.sort().values, both, right=True) / x.numel() for x in (mine, reference)]
        distance = (below[0] - below[1]).abs().max().item()
        assert distance < 1.95 * (1 / mine.numel() + 1 / reference.numel()) ** 0.5, (name, distance)
        assert mine.std().item() == pytest.approx(std, rel=0.05), name


def test_a_generator_makes_it_reproducible() -> None:
    model = Qwen3ForCausalLM(tiny_moe())
    drawn = []
    for seed in (0, 0, 1):
        model.init_weights(torch.Generator().manual_seed(seed))
        drawn.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
