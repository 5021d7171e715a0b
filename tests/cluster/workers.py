"""Real workers of the cluster's tests."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import DATA_PARALLEL, GATHER, ONE_TO_ALL, ROUND_ROBIN, transfer
from hybridflow.recipe.axes import Axis


class Worker:
    """Doubles tokens, meets its peers over gloo, and fails in every way asked for."""

    def __init__(
        self, rank: int, world: int, rendezvous: tuple[str, int], offset: int = 0, join: bool = True
    ) -> None:
        self.rank, self.world, self.offset = rank, world, offset
        self.seen: list[int] = []
        self.joined = join and world > 1
        if self.joined:
            host, port = rendezvous
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{host}:{port}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=120),
            )

    @transfer(DATA_PARALLEL)
    def double(self, batch: Batch, scale: int = 2) -> Batch:
        responses: Ragged = batch["responses"]
        values = responses.values * scale + self.offset
        return batch.with_field("doubled", Axis.TOKENS, responses.with_values(values))

    @transfer(DATA_PARALLEL)
    def rows(self, batch: Batch) -> dict[str, int]:
        return {"rank": self.rank, "samples": batch.samples}

    @transfer(GATHER)
    def total(self, value: int) -> int:
        tensor = torch.tensor([value + self.rank])
        if self.world > 1:
            dist.all_reduce(tensor)
        return int(tensor)

    @transfer(GATHER)
    def describe(self) -> dict[str, object]:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "directory": str(Path.cwd()),
            "threads": torch.get_num_threads(),
            "variables": [os.environ.get(name) for name in names],
            "python": sys.executable,
        }

    @transfer(GATHER)
    def note(self, value: int, delay: float = 0.0) -> list[int]:
        time.sleep(delay)
        self.seen.append(value)
        return self.seen

    @transfer(GATHER)
    def memory_of(self, batch: Batch) -> list[str]:
        """The mapped files in which the batch's fields lie, and one of the values."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        tensors = [batch["responses"].values, batch["logprobs"].values, batch["rewards"]]
        return [_file_of(tensor.data_ptr(), maps) for tensor in tensors]

    @transfer(ROUND_ROBIN)
    def who(self, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        return self.rank

    @transfer(ONE_TO_ALL)
    def big(self, count: int) -> torch.Tensor:
        return torch.arange(count)

    @transfer(GATHER)
    def spawn(self) -> int:
        """Starts a process that would outlive its parent, in a session of its own."""
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        return subprocess.Popen(command, start_new_session=True).pid

    @transfer(ONE_TO_ALL)
    def hang_unless(self, rank: int, how: str) -> None:
        """Rank ``rank`` fails, the others hang in a collective that it never joins."""
        if self.rank != rank:
            dist.barrier()
        if how == "raise":
            raise LookupError("no such token: 7")
        if how == "exit":
            print("about to leave", flush=True)
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    @transfer(ONE_TO_ALL)
    def sleep(self, seconds: float) -> None:
        if self.rank == self.world - 1:
            time.sleep(seconds)

    @transfer(ONE_TO_ALL)
    def unpicklable(self) -> object:
        return (value for value in range(3))

    def undeclared(self) -> None:
        """Has no transfer protocol."""


class Broken:
    """A worker whose constructor fails on one rank while the other waits for it."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        if rank == 1:
            raise ValueError("no weights here")
        time.sleep(300)

    @transfer(ONE_TO_ALL)
    def ping(self) -> str:
        return "pong"


class Sore(Worker):
    """A worker whose ``close`` raises."""

    def close(self) -> None:
        raise OSError("cannot stop the server")


def _file_of(address: int, maps: list[str]) -> str:
    for line in maps:
        span, *_, name = line.split(maxsplit=5) if line.count(" ") > 4 else [line, ""]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return name.strip()
    return ""


class Besides(Worker):
    """Takes turns while it waits."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        super().__init__(rank, world, rendezvous)
        self.turns: list[int] = []
        self.released = threading.Event()

    @transfer(ONE_TO_ALL)
    def wait_for_release(self, seconds: float) -> str:
        return "released" if self.released.wait(seconds) else "nobody came"

    @transfer(ONE_TO_ALL, beside=True)
    def take_turn(self, turn: int) -> list[int]:
        self.turns.append(turn)
        return self.turns

    @transfer(ONE_TO_ALL, beside=True)
    def release(self) -> None:
        self.released.set()
