"""Token dispatchers whose shapes do not depend on the routing: on Neuron every new shape is a new program.

    use_dispatcher(spec, "gather")                        the default of every spec of titan_recipes.models.spec
    use_dispatcher(spec, "gather", block=128)             each expert's rows in whole blocks, for operators that need it
    use_dispatcher(spec, "capacity", capacity_factor=1.25)
    use_dispatcher(spec, "all-to-all")                    TorchTitan's: exact, but sizes follow the routing

gather    On one rank the T*K rows, sorted by expert. With expert parallelism every rank gets the tokens of all ranks of
          its group, works on the rows of its own experts, and the combined outputs are summed back to each token's
          rank. Exact, no token is dropped. The rows are as many as the fullest routing needs: EP*T*min(K, E/EP).
capacity  Each rank sends every rank `capacity_factor` times its share of rows (T*K/EP) in one exchange of equal splits.
          What does not fit is dropped: it adds nothing to its token, and the run logs how much.

Collectives are torch's functional ones, with all-gather, reduce-scatter and all-to-all in equal splits only.

Shapes: T = tokens of this rank, K = experts a token, D = model dim, E = experts, e = experts of this rank, EP = ranks
that share the experts, G = EP*T tokens of all, R = rows of this rank's experts, S = EP*capacity rows sent.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    LocalTokenDispatcher,
)
from torchtitan.protocols.model_spec import ModelSpec

from ..errors import UserError
from ..upstream import (
    all_gather_single_autograd,
    all_to_all_single,
    graph_task_id,
    reduce_scatter_single_autograd,
)
from .permute import Placement, combine_rows, pack, pack_all, packed_rows, segment, take_rows

__all__ = [
    "CapacityTokenDispatcher",
    "Dispatcher",
    "FunctionalAllToAll",
    "GatherTokenDispatcher",
    "use_dispatcher",
]

Dispatcher = Literal["gather", "capacity", "all-to-all"]
"""The names that neuron_parallel.Training.dispatcher has for their memory."""


@dataclass(frozen=True, kw_only=True)
class RowsMetadata:
    """What `combine` needs of a dispatch."""

    scores_TK: torch.Tensor
    """The scores of the tokens that `placement` places: the group's (gather), else this rank's."""
    placement: Placement
    received: Placement | None = None
    """capacity: the received rows among this rank's experts."""


class GatherTokenDispatcher(BaseEPTokenDispatcher):
    """All tokens of the expert-parallel group on each of its ranks; see the top of this file."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        block: int = 1
        """Each expert's rows come in whole blocks of this many (128 for Neuron's torch._grouped_mm); what fills up is
        zero.
        """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _check_options(config)
        self.block = config.block

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, RowsMetadata]:
        """Rows of this rank's experts [R, D], sorted by expert; rows of each expert [e]; and what `combine` needs."""
        if self.ep_mesh is not None:
            return self._exchange(x_TD, topk_scores_TK, topk_expert_ids_TK)
        if self.block == 1:
            counts_e = num_local_tokens_per_expert_E
            placement = pack_all(topk_expert_ids_TK, len(counts_e))
        else:
            placement, counts_e = self._pack(topk_expert_ids_TK, self.num_experts)
        return take_rows(x_TD, placement), counts_e, RowsMetadata(scores_TK=topk_scores_TK, placement=placement)

    def _exchange(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, RowsMetadata]:
        # one small collective for scores and ids: float32 holds an expert's number exactly
        routing_T2K = torch.cat([scores_TK.float(), ids_TK.float()], 1)
        x_GD, (scores_GK, ids_GK) = _all_gather(x_TD, self.ep_mesh), _all_gather(routing_T2K, self.ep_mesh).chunk(2, 1)
        placement, counts_e = self._pack(self._local_ids(ids_GK.long()), self._local_experts)
        return take_rows(x_GD, placement), counts_e, RowsMetadata(scores_TK=scores_GK, placement=placement)

    def combine(self, routed_output_RD: torch.Tensor, metadata: RowsMetadata, x_TD: torch.Tensor) -> torch.Tensor:
        """The experts' outputs times their scores, summed for each token of this rank: [T, D]."""
        out_TD = combine_rows(routed_output_RD, metadata.placement, metadata.scores_TK)
        return out_TD if self.ep_mesh is None else _reduce_scatter(out_TD, self.ep_mesh)

    @property
    def _local_experts(self) -> int:
        assert self.ep_mesh is not None
        return self.num_experts // self.ep_mesh.size()

    def _local_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Numbers among this rank's experts; as many as there are for another rank's."""
        assert self.ep_mesh is not None
        ids = ids - self.ep_mesh.get_local_rank() * self._local_experts
        return torch.where((ids >= 0) & (ids < self._local_experts), ids, self._local_experts)

    def _pack(self, ids_TK: torch.Tensor, experts: int) -> tuple[Placement, torch.Tensor]:
        tokens, choices = ids_TK.shape
        return pack(ids_TK, experts, packed_rows(tokens * min(choices, experts), experts, self.block), self.block)


class CapacityTokenDispatcher(GatherTokenDispatcher):
    """One exchange of equal splits, with a limit on what a rank may send to another; see the top of this file."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatherTokenDispatcher.Config):
        capacity_factor: float = 1.25
        """Rows that a rank may send to each rank, relative to balanced routing."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.capacity_factor = config.capacity_factor
        self.seen: torch.Tensor | None = None
        """Choices dropped, and choices made, since the last `take_seen`."""

    def _exchange(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, RowsMetadata]:
        assert self.ep_mesh is not None
        ranks = self.ep_mesh.size()
        capacity = math.ceil(self.capacity_factor * ids_TK.numel() / ranks)
        sent = segment(ids_TK // self._local_experts, ranks, capacity)
        assert sent.here_TK is not None and sent.filled_R is not None
        self._count(sent.here_TK)
        ids_S = ids_TK.reshape(-1).index_select(0, sent.choice_R).masked_fill(~sent.filled_R, -1)
        ids_S, x_SD = _all_to_all(ids_S, self.ep_mesh), _all_to_all(take_rows(x_TD, sent), self.ep_mesh)
        received, counts_e = self._pack(self._local_ids(ids_S)[:, None], self._local_experts)
        return take_rows(x_SD, received), counts_e, RowsMetadata(scores_TK=scores_TK, placement=sent, received=received)

    def combine(self, routed_output_RD: torch.Tensor, metadata: RowsMetadata, x_TD: torch.Tensor) -> torch.Tensor:
        """Combine as GatherTokenDispatcher does. A dropped choice adds nothing."""
        if metadata.received is None:
            return super().combine(routed_output_RD, metadata, x_TD)
        y_SD = _all_to_all(combine_rows(routed_output_RD, metadata.received), self.ep_mesh)
        return combine_rows(y_SD, metadata.placement, metadata.scores_TK)

    def _count(self, here_TK: torch.Tensor) -> None:
        if not torch.is_grad_enabled() or recomputing():
            return
        with torch.no_grad():
            now = torch.stack([(~here_TK).sum(), torch.full_like(here_TK.sum(), here_TK.numel())])
            self.seen = now if self.seen is None else self.seen + now

    def take_seen(self) -> torch.Tensor | None:
        """Choices dropped and made on this rank since the last call, int64 [2], and start anew."""
        seen, self.seen = self.seen, None
        return seen


class FunctionalAllToAll(AllToAllTokenDispatcher):
    """TorchTitan's, with the functional exchange in every mode: gloo's list form of it refuses uneven splits."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _token_count_exchange(self, num_local_tokens_per_expert_E: torch.Tensor, pg: Any, ep_size: int) -> torch.Tensor:
        return all_to_all_single(num_local_tokens_per_expert_E.view(ep_size, -1), None, None, self.ep_mesh)

    def _dispatch_token_exchange(
        self, routed_input_ND: torch.Tensor, pg: Any, output_splits: list[int], input_splits: list[int]
    ) -> torch.Tensor:
        return all_to_all_single(routed_input_ND, output_splits, input_splits, self.ep_mesh)

    def _combine_token_exchange(
        self, routed_output_RD: torch.Tensor, pg: Any, input_splits: list[int], output_splits: list[int]
    ) -> torch.Tensor:
        return all_to_all_single(routed_output_RD, input_splits, output_splits, self.ep_mesh)


_DISPATCHERS: dict[str, type[LocalTokenDispatcher]] = {
    "gather": GatherTokenDispatcher,
    "capacity": CapacityTokenDispatcher,
    "all-to-all": FunctionalAllToAll,
}


def use_dispatcher(spec: ModelSpec, name: Dispatcher, **options: Any) -> None:
    """Set the token dispatcher of every layer of a spec, on every route.

    Args:
        spec: what is changed, in place.
        name: `gather`, `capacity` or `all-to-all`; docs/experts.md says how to choose.
        options: `block` (gather, capacity) and `capacity_factor` (capacity).

    Raises:
        UserError: a name or an option that there is not, a value that it cannot have, a model without a mixture of
            experts.
    """
    if name not in _DISPATCHERS:
        raise UserError(f"Dispatcher {name!r} is unknown; choose one of {', '.join(_DISPATCHERS)}.")
    layers = [config for _, config, _, _ in spec.model.traverse(RoutedExperts.Config)]
    if not layers:
        raise UserError(
            f"Dispatcher {name!r} has nothing to dispatch: {spec.flavor} has no mixture of experts. Leave "
            "use_dispatcher out."
        )
    for config in layers:
        old = config.token_dispatcher
        try:
            new = _DISPATCHERS[name].Config(num_experts=old.num_experts, top_k=old.top_k, **options)
        except TypeError as error:
            raise UserError(f"Dispatcher {name!r} does not take these options: {error}.") from None
        _check_options(new)
        config.token_dispatcher = new


def _check_options(config: LocalTokenDispatcher.Config) -> None:
    """UserError for values that no run can have."""
    block, factor = getattr(config, "block", 1), getattr(config, "capacity_factor", 1.0)
    if not isinstance(block, int) or block < 1:
        raise UserError(f"The dispatcher's block is {block!r}; it has to be a whole number of rows, 1 or more.")
    if not 0 < factor < math.inf:
        raise UserError(f"The dispatcher's capacity_factor is {factor}; it has to be a number above 0.")


def recomputing() -> bool:
    """Whether activation checkpointing runs a forward pass again: within a backward pass."""
    return not torch.compiler.is_compiling() and graph_task_id() != -1


def _all_gather(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    return _wait(all_gather_single_autograd(x.contiguous(), 0, mesh))


def _reduce_scatter(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    return _wait(reduce_scatter_single_autograd(x, "sum", 0, mesh))


def _all_to_all(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    return _wait(all_to_all_single(x.contiguous(), None, None, mesh))


def _wait(x: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return waited
