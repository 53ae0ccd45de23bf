"""Pack tokenised documents into samples of one constant length, addressable by number.

Sample i of an epoch is tokens [i*S, (i+1)*S) of that epoch's concatenation, so any rank can build any sample alone, and
"how many samples were seen" is all the state there is: it holds for any number of ranks.

Shapes: S = sequence length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""Label that the loss skips (torch's cross-entropy default)."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One packed sequence: input_S[t] predicts labels_S[t]; positions_S restarts at 0 with each document."""

    input_S: Tokens
    positions_S: Tokens
    labels_S: Tokens


class PackedDocuments:
    """Documents (each an int array of token ids, end-of-text included) as fixed-length samples.

    A document of n tokens gives n-1 (input, label) pairs: the target of its last token is never the next document's first.
    What is left at the end of an epoch is padded with IGNORE_INDEX labels. `shuffle` reorders the documents each epoch.
    """

    def __init__(self, documents: Sequence[Tokens], seq_len: int, *, shuffle: bool, seed: int = 0) -> None:
        self.documents = [document for document in documents if len(document) > 1]
        self.seq_len = seq_len
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = -1

    @cached_property
    def pairs(self) -> int:
        """Number of (input, label) pairs in an epoch."""
        return sum(len(document) - 1 for document in self.documents)

    @property
    def samples(self) -> int:
        """Number of samples in an epoch, the padded last one included."""
        return -(-self.pairs // self.seq_len)

    def padding(self) -> Sample:
        """A sample without any label, to keep ranks in step at the end of the data."""
        return self._pad([], [], [])

    def sample(self, epoch: int, index: int) -> Sample:
        """Sample `index` of `epoch`; IndexError outside [0, samples)."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        self._order_documents(epoch)
        begin, end = index * self.seq_len, min((index + 1) * self.seq_len, self.pairs)
        which = int(np.searchsorted(self._starts, begin, side="right")) - 1
        inputs, positions, labels = [], [], []
        while begin < end:
            document = self.documents[self._order[which]]
            offset = begin - int(self._starts[which])
            take = min(len(document) - 1 - offset, end - begin)
            inputs.append(document[offset : offset + take])
            labels.append(document[offset + 1 : offset + 1 + take])
            positions.append(np.arange(take))
            begin += take
            which += 1
        return self._pad(inputs, positions, labels)

    def _order_documents(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        count = len(self.documents)
        self._order = np.random.default_rng((self.seed, epoch)).permutation(count) if self.shuffle else np.arange(count)
        lengths = [len(self.documents[i]) - 1 for i in self._order]
        self._starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self._epoch = epoch

    def _pad(self, inputs: list[Tokens], positions: list[Tokens], labels: list[Tokens]) -> Sample:
        missing = self.seq_len - sum(map(len, inputs))
        if missing:
            inputs.append(np.zeros(missing, np.int64))
            positions.append(np.arange(missing))
            labels.append(np.full(missing, IGNORE_INDEX))
        return Sample(np.concatenate(inputs), np.concatenate(positions), np.concatenate(labels))
