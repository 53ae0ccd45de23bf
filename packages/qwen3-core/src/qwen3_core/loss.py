"""The training loss, and what it has to be before anything is learned.

B = batch, T = positions, V = vocabulary. `expected_random_loss` needs no torch.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
