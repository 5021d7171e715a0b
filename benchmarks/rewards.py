"""What scoring in a process of its own costs a sample, beside a plain loop over the same function.

    .venv/bin/python -m benchmarks.rewards

512 samples as the quickstart has them. Figures are microseconds a sample: of CPU in the plain loop,
in the worker that calls `Scorer.score` and in the scoring process, and by the clock. Others on the
machine count in the last one alone. Writes ``benchmarks/results/rewards.json``; exits 1 when the
target is missed.
"""

import asyncio
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hybridflow.rewards import Reward, RewardItem, Scorer, resolve

RESULT = Path(__file__).parent / "results" / "rewards.json"
SAMPLES, TOKENS, ROUNDS = 512, 32, 15
TARGET_SECONDS = 0.015
"""For ``SAMPLES`` of ``exact_match``: CPU time of worker and scoring process together."""


class InBatches:
    """The same as ``exact_match``, 32 samples a call."""

    def score(self, items: Sequence[RewardItem]) -> list[float]:
        return [float(item.response.strip() == item.answer) for item in items]


async def awaited(prompt: str, response: str, answer: str, row: dict[str, Any]) -> float:
    """The same as ``exact_match``, once the loop has gone round."""
    await asyncio.sleep(0)
    return float(response.strip() == answer)


def by_token(prompt: str, response: list[str], answer: str, row: dict[str, Any]) -> list[float]:
    """A value for each token."""
    return [float(token == answer) for token in response]


def raises(prompt: str, response: str, answer: str, row: dict[str, Any]) -> float:
    """Every sample fails: what failures cost."""
    raise ValueError(response)


CASES = ["exact_match", "number_match"] + [
    f"benchmarks.rewards.{name}" for name in ("InBatches", "awaited", "by_token", "raises")
]


def samples(by_token: bool) -> list[RewardItem]:
    """Sums with their rows, half of them right."""
    found = []
    for number in range(SAMPLES):
        prompt, answer = f"{number}+1=", str(number + 1)
        row = {"prompt": prompt, "answer": answer, "prompt_text": prompt}
        found.append(RewardItem(prompt, answer if number % 2 else "7", answer, row))
    tokens = tuple("7" * TOKENS) if by_token else None
    return [replace(item, tokens=tokens) for item in found]


def plain(reward: Reward, items: list[RewardItem]) -> None:
    """The function alone, call after call in this process."""
    calls = [items[start : start + reward.batch] for start in range(0, len(items), reward.batch)]

    async def awaited() -> None:
        for call in calls:
            await reward.call(*reward.arguments(call))

    if reward.is_async:
        asyncio.run(awaited())
        return
    for call in calls:
        reward.call(*reward.arguments(call))


def median_of(run: Callable[[], Any], *clocks: Callable[[], float]) -> list[float]:
    """Microseconds a sample of ``run`` by each clock, over the rounds after one to warm up."""
    rounds = []
    for _ in range(ROUNDS + 1):
        before = [clock() for clock in clocks]
        run()
        after = [clock() for clock in clocks]
        rounds.append([b - a for a, b in zip(before, after, strict=True)])
    kept = zip(*rounds[1:], strict=True)
    return [round(statistics.median(seconds) / SAMPLES * 1e6, 2) for seconds in kept]


def measure(name: str) -> dict[str, float]:
    """Microseconds a sample of both ways."""
    items, reward = samples(name.endswith("by_token")), resolve(name)
    found: dict[str, float] = {}
    if not name.endswith("raises"):
        (found["plain"],) = median_of(lambda: plain(reward, items), time.process_time)
    with Scorer(name) as scorer:
        scorer.wait_until_ready()
        (child,) = psutil.Process().children()
        spent = Path(f"/proc/{child.pid}/schedstat")  # its first number: nanoseconds on a CPU

        def in_child() -> float:
            return int(spent.read_text().split()[0]) / 1e9

        clocks = time.process_time, in_child, time.perf_counter
        figures = median_of(lambda: scorer.score(items, 60), *clocks)
    return found | dict(zip(("worker", "scoring_process", "clock"), figures, strict=True))


def peak_bytes(who: int) -> int:
    """Most resident memory of this process, or of the largest of its ended ones."""
    return resource.getrusage(who).ru_maxrss * 1024


def main() -> int:
    load, cases = os.getloadavg()[0], {}
    for name in CASES:
        cases[name.rpartition(".")[2]] = measure(name)
    target = TARGET_SECONDS / SAMPLES * 1e6
    result = {
        "samples": SAMPLES,
        "microseconds_a_sample": cases,
        "target": round(target, 2),
        "worker_peak_bytes": peak_bytes(resource.RUSAGE_SELF),
        "scoring_process_peak_bytes": peak_bytes(resource.RUSAGE_CHILDREN),
        "load_average": load,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(RESULT.read_text(encoding="utf-8"))
    quick = cases["exact_match"]
    return int(quick["worker"] + quick["scoring_process"] > target)


if __name__ == "__main__":
    sys.exit(main())
