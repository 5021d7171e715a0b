"""A side of benchmarks/convert.py: a process that imports once and forks for each job.

So a job is timed without its imports, holds nothing of the job before, and the sides can take
turns. A job is a function of plain values to plain values.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.convert_memory import ROOT

JOB_SECONDS = 600.0
Jobs = Mapping[str, Callable[..., dict[str, Any]]]


def serve(jobs: Jobs) -> None:
    """Answer every line of standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        asked = json.loads(line)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, jobs[asked["job"]], asked["arguments"])
        )
        process.start()
        theirs.close()
        try:
            answer = ours.recv()
        except EOFError:
            answer = {"error": "the job's process died"}
        process.join()
        print(json.dumps(answer), file=answers, flush=True)


def _run(connection: Any, job: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> None:
    try:
        connection.send(job(**arguments))
    except Exception:  # noqa: BLE001  (it goes to the parent, which raises)
        connection.send({"error": traceback.format_exc()})


class Side:
    """The process from outside.

    Args:
        python: its interpreter.
        module: what it runs; calls ``serve``.
        log: for its standard error.
    """

    def __init__(self, python: Path, module: str, log: Path) -> None:
        self._log = log
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", module],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    @property
    def pid(self) -> int:
        """Of the process; those of the jobs descend from it."""
        return self._process.pid

    def run(self, job: str, **arguments: Any) -> dict[str, Any]:
        """One job; paths are given as text.

        Raises:
            RuntimeError: when it fails, with its traceback.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        given = {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()}
        self._process.stdin.write(json.dumps({"job": job, "arguments": given}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the side's process died"}
        if "error" in answer:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"{job}: {answer['error']}\nThe end of {self._log}:\n{tail}")
        return answer

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
