"""The worker of benchmarks/batch.py."""

from hybridflow.batch import Batch
from hybridflow.cluster import DATA_PARALLEL, transfer


class Echo:
    """Reads a field of its piece and gives the piece back."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        self.rank = rank

    @transfer(DATA_PARALLEL)
    def echo(self, batch: Batch) -> Batch:
        batch["loss_mask"].values.sum()
        return batch
