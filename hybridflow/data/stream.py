"""The order in which prompts are drawn: shuffled anew each epoch, resumable anywhere."""

import random

from hybridflow.data.dataset import PromptDataset, PromptRow


class PromptStream:
    """An endless stream over a dataset, a function of (dataset, seed, shuffle, position) alone.

    ``position`` counts the prompts drawn since the start, across epochs. A stream that seeks to
    a position gives exactly what one that was drawn up to there gives.
    """

    def __init__(self, dataset: PromptDataset, seed: int, shuffle: bool = True) -> None:
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self._position = 0
        self._order_epoch = -1
        self._order: list[int] = []

    @property
    def position(self) -> int:
        """Number of prompts drawn so far."""
        return self._position

    @property
    def epoch(self) -> int:
        """The pass over the data, from 0, that the next prompt belongs to."""
        return self._position // len(self.dataset)

    def seek(self, position: int) -> None:
        """Go on as if ``position`` prompts had been drawn."""
        if position < 0:
            raise ValueError(f"a stream's position is at least 0, not {position}")
        self._position = position

    def next(self, n: int) -> list[PromptRow]:
        """The next ``n`` prompts; at an epoch's end it goes on into the next, shuffled anew.

        Raises:
            ValueError: ``n`` is not positive, or more than the dataset holds.
        """
        if not 0 < n <= len(self.dataset):
            raise ValueError(
                f"{n} prompts a step cannot be drawn from the {len(self.dataset)} of "
                f"{self.dataset.path}: lower prompts_per_step or bring more data"
            )
        rows = [self.dataset.row(self._index(p)) for p in range(self._position, self._position + n)]
        self._position += n
        return rows

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.dataset))
        if epoch != self._order_epoch:
            self._order = self._shuffled(epoch)
            self._order_epoch = epoch
        return self._order[offset]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order
