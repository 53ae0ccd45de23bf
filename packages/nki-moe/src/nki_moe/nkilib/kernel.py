"""AWS's forward and backward with the arguments that training needs: tensors first, then constants that can be hashed.

Imported where one is launched and by nothing else. Dimensions as in layout.py.
"""

from importlib import import_module
from typing import Any

from nki_moe.backend import nkilib_home
from nki_moe.toolchain import nki

_library = nkilib_home()
_forward = import_module(f"{_library}.core.moe.moe_cte.bwmm_shard_on_I").blockwise_mm_baseline_shard_intermediate
_after = import_module(f"{_library}.core.utils.common_types").ExpertAffinityScaleMode.POST_SCALE
_backward = import_module(f"{_library}.experimental.moe.bwd.blockwise_mm_backward").blockwise_mm_bwd


@nki.jit
def forward(
    hidden: Any, affinities: Any, gate_up: Any, down: Any, positions: Any, experts: Any, block_size: int, save: bool
) -> Any:
    """Return out (T + 1, H), and with `save` gate_up_T (N, 2, I, B) and down (N, B, H) before affinities."""
    return _forward(
        hidden_states=hidden,
        expert_affinities_masked=affinities,
        gate_up_proj_weight=gate_up,
        down_proj_weight=down,
        block_size=block_size,
        token_position_to_id=positions,
        block_to_expert=experts,
        expert_affinities_scaling_mode=_after,
        checkpoint_activation=save,
    )


@nki.jit
def backward(
    hidden: Any,
    affinities: Any,
    gate_up: Any,
    down: Any,
    positions: Any,
    experts: Any,
    gate_up_T: Any,
    down_saved: Any,
    dout: Any,
    block_size: int,
) -> Any:
    """Gradients of hidden, affinities, gate_up and down."""
    return _backward(
        hidden_states=hidden,
        expert_affinities_masked=affinities,
        gate_up_proj_weight=gate_up,
        down_proj_weight=down,
        gate_up_proj_act_checkpoint_T=gate_up_T,
        down_proj_act_checkpoint=down_saved,
        token_position_to_id=positions,
        block_to_expert=experts,
        output_hidden_states_grad=dout,
        block_size=block_size,
    )
