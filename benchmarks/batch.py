"""A batch to eight data-parallel ranks through Ray and back, beside verl 0.9.1's DataProto.

    .venv/bin/python -m benchmarks.batch

1,024 samples of at most 4,096 tokens (long-tailed), five fields; each rank reads one field and
gives its piece back, the driver joins the pieces. Both sides run in processes of their own, one
after the other, on the same torch and Ray. verl's environment, ``.venv-verl``, is made on demand.
Writes ``benchmarks/results/batch.json``; exits 1 when the target is missed.
"""

import argparse
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "batch.json"
SAMPLES, MAX_TOKENS, RANKS, ROUNDS = 1024, 4096, 8, 7
FIELDS = {
    "responses": "int64",
    "loss_mask": "int64",
    "versions": "int64",
    "logprobs": "float32",
    "advantages": "float32",
}
TARGET = 0.2
"""Of verl's time, in its default serialisation."""

VERL_PACKAGES = [
    "verl==0.9.1",
    "tensordict==0.15.3",
    "pyvers",
    "omegaconf",
    "antlr4-python3-runtime==4.9.3",
    "codetiming",
    "hydra-core",
    "cloudpickle",
    "orjson",
    "importlib_metadata",
    "zipp",
]

Result = TypeVar("Result")


def lengths() -> list[int]:
    """Tokens of every sample: log-normal, mean about 1,400, cut at ``MAX_TOKENS``."""
    drawn = np.random.default_rng(0).lognormal(7.0, 0.8, SAMPLES)
    return np.clip(drawn.astype(int), 1, MAX_TOKENS).tolist()


def time_rounds(round_trip: Callable[[], Result]) -> tuple[list[float], Result]:
    """Seconds of each of ``ROUNDS`` rounds after two to warm up, and the last round's result."""
    round_trip()
    result = round_trip()
    seconds = []
    for _ in range(ROUNDS):
        del result  # so that neither side keeps the round before in the object store
        start = time.perf_counter()
        result = round_trip()
        seconds.append(time.perf_counter() - start)
    return seconds, result


def peak_memory() -> int:
    """Peak resident bytes of this process, the driver; shared memory that it touched included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_ours() -> None:
    """This project's side."""
    import torch

    from benchmarks.peers.echo import Echo
    from hybridflow.batch import Batch, Ragged
    from hybridflow.cluster import RaySession
    from hybridflow.recipe.axes import Axis
    from megatron_bridge.layout import ParallelLayout

    torch.set_num_threads(1)
    sizes = torch.tensor(lengths())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    fields = {
        name: Ragged(torch.ones(int(offsets[-1]), dtype=getattr(torch, dtype)), offsets)
        for name, dtype in FIELDS.items()
    }
    batch = Batch(fields, dict.fromkeys(fields, Axis.TOKENS), SAMPLES)
    with RaySession(1, RANKS, object_store_bytes=2 << 30) as session:
        pool = session.pool("ranks", RANKS)
        group = session.group("echo", Echo, ParallelLayout(dp=RANKS), pool).wait_until_started()
        seconds, result = time_rounds(lambda: group.run(Echo.echo, batch))
        assert result.equals(batch)
        print(json.dumps({"seconds": seconds, "carried": _carried(batch), "peak": peak_memory()}))


def _carried(batch: Any) -> int:
    total = 0
    for piece in batch.split(RANKS):
        buffers: list[pickle.PickleBuffer] = []
        total += len(pickle.dumps(piece, protocol=5, buffer_callback=buffers.append))
        total += sum(buffer.raw().nbytes for buffer in buffers)
    return total


def verl_python() -> Path:
    """The interpreter of verl's environment, made on demand: verl without its dependencies, which
    are taken from this project's environment, so that both sides run the same torch and Ray."""
    folder = ROOT / ".venv-verl"
    python = folder / "bin" / "python"
    marker = folder / "ready"
    if not marker.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        site = next((folder / "lib").glob("python3*/site-packages"))
        (site / "hybridflow_environment.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
        install = [str(python), "-m", "pip", "install", "-q", "--no-deps", *VERL_PACKAGES]
        subprocess.run(install, check=True)
        marker.touch()
    return python


def run_side(python: Path, *command: str) -> dict[str, Any]:
    """Runs a side and reads the JSON line that it ends with."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [str(python), *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=900
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
    side = json.loads(done.stdout.splitlines()[-1])
    return {**side, "median": statistics.median(side["seconds"])}


def main() -> int:
    """Runs both sides; 0 when the target is met."""
    parser = argparse.ArgumentParser(description="a batch through Ray and back, beside verl")
    parser.add_argument("--ours", action="store_true", help="run this project's side alone")
    if parser.parse_args().ours:
        run_ours()
        return 0
    python = verl_python()
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    sides = {
        "hybridflow": run_side(Path(sys.executable), "-m", "benchmarks.batch", "--ours"),
        "verl": run_side(python, "-m", "benchmarks.peers.verl_batch"),
        "verl_numpy": run_side(python, "-m", "benchmarks.peers.verl_batch", "--numpy"),
    }
    ratio = sides["hybridflow"]["median"] / sides["verl"]["median"]
    report = {
        "samples": SAMPLES,
        "tokens": sum(lengths()),
        "fields": FIELDS,
        "ranks": RANKS,
        "cores": cores,
        "load_before": load,
        "quiet": load < cores / 2,
        "sides": sides,
        "ratio": ratio,
        "ratio_to_verl_numpy": sides["hybridflow"]["median"] / sides["verl_numpy"]["median"],
        "target": TARGET,
        "met": ratio <= TARGET,
    }
    aside = RESULT.with_suffix(".json.new")
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text(json.dumps(report, indent=2) + "\n")
    aside.rename(RESULT)
    for name, side in sides.items():
        print(
            f"{name:>11}: {side['median']:.3f} s a round, {side['carried'] / 1e6:.0f} MB carried "
            f"each way, driver's peak {side['peak'] / 1e6:.0f} MB"
        )
    print(
        f"ratio {ratio:.3f} (target {TARGET}); to verl's numpy option "
        f"{report['ratio_to_verl_numpy']:.3f}; machine "
        f"{'quiet' if report['quiet'] else f'not quiet (load {load:.1f} on {cores} cores)'}"
    )
    return 0 if report["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
