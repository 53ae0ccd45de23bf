"""What the expert MLP is asked to do, besides its rows: one name for what operators, paths and kernels pass on."""

from typing import NamedTuple

from torch import Tensor

from nki_moe.tables import Placement

__all__ = ["Work"]


class Work(NamedTuple):
    """Counts, weights, and, when rows are gathered from tokens, where the tokens' choices go.

    R rows, T tokens, K choices a token, E experts, D model dim, F hidden dim.
    """

    counts_E: Tensor
    w1_EFD: Tensor
    w2_EDF: Tensor
    w3_EFD: Tensor
    row_TK: Tensor | None
    choice_R: Tensor | None
    scores_TK: Tensor | None

    @property
    def fused(self) -> bool:
        """Whether rows are gathered from tokens and summed over their choices."""
        return self.scores_TK is not None

    @property
    def placement(self) -> Placement | None:
        """Where choices go, if rows are gathered."""
        if self.row_TK is None or self.choice_R is None:
            return None
        return Placement(self.row_TK, self.choice_R)

    def rows(self, x: Tensor) -> int:
        """R, given the rows or the tokens."""
        return x.shape[0] if self.choice_R is None else self.choice_R.shape[0]
