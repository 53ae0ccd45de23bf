"""Routing as the kernels read it: integer tables of fixed shape, computed in torch from the counts.

No count is ever part of a program.

An expert's rows are cut into items of `blocks` x 128 rows. The last item of an expert is filled up with row numbers
past the end, which DMA skips. There are two lists of items:

    data     every expert's items, dealt to the cores in turn; an odd last pass gets an item of skipped rows only
    sums     the same items, and one of skipped rows for each expert without rows, since its gradient is zero; all
    cores have them all

Nothing here sorts, searches or asks the device for a value: places are cumulative sums of one-hot comparisons, in
int32.

R rows, E experts, T tokens, K experts a token, M items at most, P = 128 partitions, B blocks of an item.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nki_moe.hardware import P

__all__ = ["CLEARED", "Placement", "Tables", "most_items", "place", "tables"]

CLEARED = 4  # blocks of rows of no expert that one pass of the clearing loop zeroes


class Placement(NamedTuple):
    """Where the choices of tokens go, when the experts gather rows from tokens themselves."""

    row_TK: Tensor
    """(T, K) int32: the row of each choice, where rows are sorted by expert and, within an expert, by token."""
    choice_R: Tensor
    """(R,) int32: the choice t*K + k of each row."""


class Tables(NamedTuple):
    """What the kernels read of one routing. Indices of P rows lie end to end by partition, as SBUF takes them."""

    passes: Tensor
    """(1, 3) int32, each at least 1: passes of the loop over data, over sums, over rows to clear."""
    data_expert: Tensor
    """(M / cores, cores) int32: the expert of each core's item."""
    data_rows: Tensor
    """(M / cores, cores * P * B) int32: its rows; R where there is none."""
    data_reads: Tensor
    """The same for what the rows are read from: tokens, when rows are gathered; T where there is none."""
    sum_expert: Tensor
    """(M, 1) int32."""
    sum_rows: Tensor
    """(M, P * B) int32."""
    sum_reads: Tensor
    """(M, P * B) int32."""
    sum_keep: Tensor
    """(M, 1) float32: 0 for the first item of an expert, 1 for an item that is added to the one before."""
    clear: Tensor
    """(passes, P * CLEARED) int32: the rows of no expert, then R."""
    row_TK: Tensor
    """(T, K) int32: the row of each choice; one zero when rows are not gathered."""
    score_R: Tensor
    """(R, 1) float32: the score of each row; one zero when rows are not gathered."""

    @staticmethod
    def shapes(rows: int, experts: int, tokens: int, choices: int, blocks: int, cores: int) -> "list[tuple[int, int]]":
        """The shape of each table; choices is 0 when rows are not gathered."""
        size, cleared = blocks * P, P * CLEARED
        M = most_items(rows, experts, size, cores)
        data, sums = (M // cores, cores * size), (M, size)
        edge = ((tokens, choices), (rows, 1)) if choices else ((1, 1), (1, 1))
        return [
            (1, 3),
            (M // cores, cores),
            data,
            data,
            (M, 1),
            sums,
            sums,
            (M, 1),
            (-(-rows // cleared), cleared),
            *edge,
        ]

    @classmethod
    def packed(cls, *sizes: int) -> int:
        """Numbers of all tables together."""
        return sum(a * b for a, b in cls.shapes(*sizes))

    def pack(self) -> Tensor:
        """All tables in one int32 tensor, which an operator can return."""
        return torch.cat([t.view(torch.int32).reshape(-1) if t.is_floating_point() else t.reshape(-1) for t in self])

    @classmethod
    def unpack(cls, packed: Tensor, *sizes: int) -> "Tables":
        """The tables that `pack` put together, for the same sizes."""
        shapes = cls.shapes(*sizes)
        parts = [part.view(shape) for part, shape in zip(packed.split([a * b for a, b in shapes]), shapes, strict=True)]
        found = cls(*parts)
        return found._replace(sum_keep=found.sum_keep.view(torch.float32), score_R=found.score_R.view(torch.float32))


def most_items(rows: int, experts: int, size: int, cores: int) -> int:
    """Items that any routing of so many rows fits into: a multiple of the cores."""
    items = rows // size + experts
    return -(-items // cores) * cores


def place(experts_TK: Tensor, experts: int) -> tuple[Placement, Tensor]:
    """The rows of all choices and the rows of each expert, without a sort.

    A cumulative sum over an expert's one-hot column numbers its choices. A choice of no expert is in no count.
    """
    T, K = experts_TK.shape
    device = experts_TK.device
    chosen_NE = (experts_TK.reshape(-1, 1) == torch.arange(experts, device=device)).int()
    number_NE = chosen_NE.cumsum(0, dtype=torch.int32)
    counts_E = number_NE[-1] if T * K else chosen_NE.sum(0, dtype=torch.int32)
    number_NE = number_NE + (counts_E.cumsum(0, dtype=torch.int32) - counts_E - 1)
    row_N = (number_NE * chosen_NE).sum(1, dtype=torch.int32)
    every_N = torch.arange(T * K, dtype=torch.int32, device=device)
    choice_R = torch.zeros_like(every_N).scatter(0, row_N.long(), every_N)
    return Placement(row_N.view(T, K), choice_R), counts_E


def tables(
    counts_E: Tensor, rows: int, placement: Placement | None, scores_TK: Tensor | None, blocks: int, cores: int
) -> Tables:
    """The tables of one routing.

    Args:
        counts_E: (E,) int32 or int64, rows of each expert.
        rows: R, at least the sum of the counts.
        placement: where choices go, when rows are read from tokens.
        scores_TK: (T, K), their scores.
        blocks: B, the blocks of P rows in an item.
        cores: physical cores of the logical NeuronCore.
    """
    device, size = counts_E.device, blocks * P
    M = most_items(rows, counts_E.shape[0], size, cores)
    counts = counts_E.int()
    end_E = counts.cumsum(0, dtype=torch.int32)
    start_E = end_E - counts
    which_E = torch.arange(counts.shape[0], dtype=torch.int32, device=device)

    data_items_E = (counts + (size - 1)) // size
    items_2E = torch.stack([data_items_E, data_items_E.clamp(min=1)])
    after_2E = items_2E.cumsum(1, dtype=torch.int32)
    before_2E = after_2E - items_2E
    number_M1 = torch.arange(M, dtype=torch.int32, device=device)[:, None]
    mine_2ME = (number_M1 >= before_2E[:, None]) ^ (number_M1 >= after_2E[:, None])
    # the item's expert, where its rows start and end, and what to add to its number times `size` for its own first
    # row; an item of no expert has zeros, so its rows are past their end
    own_2E = start_E - before_2E * size
    of_expert_24E = torch.stack([v.expand_as(own_2E) for v in (which_E, start_E, end_E, own_2E)], dim=1)
    of_item_24M = (mine_2ME[:, None] * of_expert_24E[:, :, None]).sum(3, dtype=torch.int32)
    expert_2M, start_2M, end_2M, own_2M = of_item_24M.unbind(1)
    every_MU = torch.arange(M * size, dtype=torch.int32, device=device).view(M, blocks, P).mT.reshape(M, size)
    row_2MU = own_2M[..., None] + every_MU
    later_M1 = row_2MU[1, :, :1] > start_2M[1, :, None]  # before what lies past the end is marked
    row_2MU = torch.where(row_2MU < end_2M[..., None], row_2MU, rows)

    read_2MU, row_TK, score_R = row_2MU, torch.zeros_like(row_2MU[0, :1, :1]), torch.zeros((1, 1), device=device)
    if placement is not None and scores_TK is not None:
        T, K = scores_TK.shape
        row_TK = placement.row_TK
        token_R = torch.nn.functional.pad(placement.choice_R // K, (0, 1), value=T)
        read_2MU = token_R[row_2MU]
        score_R = scores_TK.reshape(-1).float()[placement.choice_R][:, None]

    cleared = P * CLEARED
    longest = -(-rows // cleared)
    clear = torch.arange(longest * cleared, dtype=torch.int32, device=device).view(longest, CLEARED, P)
    clear = (clear.mT + end_E[-1]).clamp(max=rows).reshape(longest, cleared)
    total = after_2E[:, -1]
    passes = torch.stack([(total[0] + (cores - 1)) // cores, total[1], (rows - end_E[-1] + (cleared - 1)) // cleared])
    return Tables(
        passes=passes.clamp(min=1)[None],
        data_expert=expert_2M[0].view(-1, cores),
        data_rows=row_2MU[0].reshape(-1, cores * size),
        data_reads=read_2MU[0].reshape(-1, cores * size),
        sum_expert=expert_2M[1][:, None],
        sum_rows=row_2MU[1],
        sum_reads=read_2MU[1],
        sum_keep=later_M1.float(),
        clear=clear,
        row_TK=row_TK,
        score_R=score_R,
    )
