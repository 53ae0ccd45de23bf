"""Contract: a model sharded by SimpleFSDP over real ranks has the loss and the gradients of the whole model on one."""

import pytest
import torch
from ranks import run_ranks
from tiny import tiny_spec


def batch():
    tokens_BL = torch.randint(0, 320, (2, 33), generator=torch.Generator().manual_seed(1))
    return tokens_BL[:, :-1], torch.arange(32).expand(2, 32), tokens_BL[:, 1:]


def whole():
    """A model without any parallelism, with weights that are the same in every process."""
    model = tiny_spec().model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1))
    return model


def loss_of(model, tokens_BL, positions_BL, labels_BL):
    logits = model(tokens_BL, positions_BL).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BL.flatten(), reduction="sum")


def sharded(rank, checkpointed):
    """This rank's part of the loss, and all gradients, put together."""
    from titan_recipes.models.activation_checkpoint import SaveLinears
    from titan_recipes.models.simple_fsdp import simple_fsdp
    from torch.distributed.tensor import distribute_tensor
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, 2)
    dims.build_mesh()
    set_spmd_backend("partial_dtensor")
    source = dict(whole().named_parameters())
    ours = simple_fsdp(tiny_spec())
    with torch.device("meta"):
        model = ours.model.build()
    model = ours.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=SaveLinears.Config() if checkpointed else None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for name, parameter in model.named_parameters():
            full = source[name.replace("_checkpoint_wrapped_module.", "")].detach()
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))
    loss = loss_of(model, *(part[rank : rank + 1] for part in batch()))
    loss.backward()
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.full_tensor().numpy()
        for name, parameter in model.named_parameters()
    }
    shards = {parameter.to_local().numel() / parameter.numel() for parameter in model.parameters()}
    return loss.item(), gradients, shards


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "save-linears"])
def test_loss_and_gradients_over_two_ranks_equal_the_whole_models(checkpointed):
    model = whole()
    expected = loss_of(model, *batch())
    expected.backward()
    results = run_ranks(sharded, 2, checkpointed)
    assert sum(loss for loss, _, _ in results) == pytest.approx(expected.item(), rel=1e-5)
    for _, gradients, shards in results:
        assert shards == {0.5}  # each rank stores a half
        for name, parameter in model.named_parameters():
            largest = parameter.grad.abs().max()
            assert (torch.from_numpy(gradients[name]) - parameter.grad).abs().max() <= 1e-5 * largest, name
