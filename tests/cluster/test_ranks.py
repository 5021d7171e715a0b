"""A session over torchrun's ranks: rank 0 has the results, and the reason of a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "ranks_job.py"
DEADLINE = 180.0


def run(way: str) -> tuple[int, str]:
    """Exit code and output of the job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        + ["--nproc-per-node", "2", str(JOB), way],
        env={**kept, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_rank_0_has_the_results_of_all() -> None:
    code, output = run("well")
    assert code == 0, output
    assert "rank 0 has [21, 21]" in output and "rank 1 was let go" in output


def test_the_reason_reaches_a_rank_that_waits_in_a_collective() -> None:
    code, output = run("raise")
    assert code == 1
    assert "rank 0 was told: adder rank 1: KeyError in total: 'units'" in output, output


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job() -> None:
    code, output = run("die")
    assert code == 1 and "SIGKILL" in output
    assert "rank 0 has" not in output
    assert "rank 0 was told: adder rank 1 died" in output or "SIGTERM" in output, output
