"""verl's side of benchmarks/batch.py: DataProto, split and sent as verl's worker groups do.

Runs in its own environment, beside the same torch and Ray. ``--numpy`` takes verl's optional
serialisation in place of its default.
"""

import json
import os
import pickle
import sys

if "--numpy" in sys.argv:
    os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = "numpy"

import ray
import torch
from verl import DataProto
from verl.utils.ray_utils import parallel_put

from benchmarks.batch import FIELDS, MAX_TOKENS, RANKS, lengths, peak_memory, time_rounds


@ray.remote(num_cpus=1)
class Echo:
    """Reads a field of its piece and gives the piece back."""

    def echo(self, piece: DataProto) -> DataProto:
        assert piece.batch is not None
        piece.batch["loss_mask"].sum()
        return piece


def make() -> DataProto:
    """The samples, padded to the longest as verl has them."""
    sizes = torch.tensor(lengths())
    inside = torch.arange(MAX_TOKENS) < sizes[:, None]
    return DataProto.from_dict(
        {name: inside.to(getattr(torch, dtype)) for name, dtype in FIELDS.items()}
    )


def main() -> None:
    torch.set_num_threads(1)
    ray.init(
        num_cpus=RANKS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2 << 30,
        runtime_env={"env_vars": {**os.environ, "OMP_NUM_THREADS": "1"}},
    )
    workers = [Echo.remote() for _ in range(RANKS)]
    data = make()

    def round_trip() -> DataProto:
        pieces = parallel_put(data.chunk(RANKS), max_workers=os.cpu_count())
        answers = [worker.echo.remote(piece) for worker, piece in zip(workers, pieces, strict=True)]
        return DataProto.concat(ray.get(answers))

    seconds, result = time_rounds(round_trip)
    assert torch.equal(result.batch["logprobs"], data.batch["logprobs"])
    carried = sum(len(pickle.dumps(piece)) for piece in data.chunk(RANKS))
    print(json.dumps({"seconds": seconds, "carried": carried, "peak": peak_memory()}))
    ray.shutdown()


if __name__ == "__main__":
    main()
