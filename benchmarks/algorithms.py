"""Advantages, losses with their gradients, and corrections, beside verl 0.9.1's functions.

    .venv/bin/python -m benchmarks.algorithms

1,024 responses of at most 4,096 tokens, once all of them that long, once of long-tailed lengths;
float32, one thread, CPU seconds. verl pads every response to the longest, here they lie end to
end. Both sides run in processes of their own, one after the other, on the same torch; verl's
environment, ``.venv-verl``, is made on demand. Writes ``benchmarks/results/algorithms.json``;
exits 1 when a function misses the target.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.batch import MAX_TOKENS, ROOT, SAMPLES, lengths, run_side, verl_python

RESULT = ROOT / "benchmarks" / "results" / "algorithms.json"
GAMMA, LAMBDA, VALUE_CLIP = 0.99, 0.95, 0.2
GROUP, ROUNDS, TARGET = 8, 5, 0.5
"""Samples of a prompt; timed rounds; the target as a share of verl's time."""

ADVANTAGES = {
    "group_relative": "grpo",
    "rloo": "rloo",
    "opo": "opo",
    "remax": "remax",
    "gpg": "gpg",
    "reinforce_pp": "reinforce_plus_plus",
    "reinforce_pp_baseline": "reinforce_plus_plus_baseline",
}
"""Ours -> verl's name."""

LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo_clip": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}),
    "dual_clip": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1.5}),
    "gspo": ("gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}),
    "cispo": ("cispo", {"clip_ratio_low": 0.5, "clip_ratio_high": 0.28}),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gpg": ("gpg", {}),
}
"""Ours -> verl's name and the settings of both, in verl's words."""

CORRECTIONS = {"truncated token": ("token", 2.0), "truncated sequence_sum": ("sequence", 2.0)}
"""Ours -> verl's level and bound."""


def sizes_of(shape: str) -> list[int]:
    """Tokens of each response."""
    return [MAX_TOKENS] * SAMPLES if shape == "full" else lengths()


MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""``mallopt``'s parameters."""


def keep_freed_memory() -> None:
    """Memory of freed tensors is used again, as by the caching allocators of trainers.

    Left to itself, malloc gives some of it back, by the order of what was allocated before: fresh
    pages cost up to four times as much as the arithmetic, on one side and not on the other.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


def give_back_freed_memory() -> None:
    """Memory of freed tensors goes back to the system, now and from now on, so that a peak of the
    process is one of what was held at once."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)


def measure(call: Callable[[], Any]) -> dict[str, Any]:
    """CPU seconds of each round after one to warm up; one thread, so that others on the machine
    hardly count."""
    call()
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return {"seconds": seconds, "least": min(seconds)}


def measure_memory(call: Callable[[], Any]) -> dict[str, Any]:
    """Bytes that a call holds at most beside what was there before; in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        call()
        give_back_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = _memory("VmRSS")
        call()
        os.write(writer, str(_memory("VmHWM") - before).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        peak = pipe.read()
    if status or not peak:
        raise RuntimeError(f"a measured call ended with status {status}")
    return {"peak": int(peak)}


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) * 1024


def ours(shape: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """This project's side: every case by name."""
    import torch

    from hybridflow.algorithms import FUNCTIONS, FunctionContext
    from hybridflow.algorithms import LOSSES as OURS
    from hybridflow.algorithms.advantages import gae
    from hybridflow.algorithms.aggregation import token_weights, weighted_sum
    from hybridflow.algorithms.correction import correct
    from hybridflow.algorithms.losses import Sequences, TokenInputs
    from hybridflow.algorithms.values import ValueInputs, value_clip
    from hybridflow.batch import Batch, Ragged
    from hybridflow.ragged import spread_over
    from hybridflow.recipe.axes import Axis

    torch.manual_seed(0)
    lengths_S = torch.tensor(sizes_of(shape))
    tokens = int(lengths_S.sum())
    offsets = torch.cat([lengths_S.new_zeros(1), lengths_S.cumsum(0)])
    responses = Ragged(torch.zeros(tokens, dtype=torch.int64), offsets)
    fields = {"rewards": torch.rand(SAMPLES), "baseline": torch.rand(SAMPLES // GROUP)}
    axes = {"rewards": Axis.SAMPLES, "baseline": Axis.PROMPTS, "responses": Axis.TOKENS}
    batch = Batch({**fields, "responses": responses}, axes, SAMPLES // GROUP, GROUP)
    sequences = Sequences.of(responses)
    advantages_T = torch.repeat_interleave(torch.randn(SAMPLES), lengths_S)
    logprobs_T = -1 - torch.rand(tokens)
    old_T = logprobs_T + torch.rand(tokens) - 0.5

    def advantage(name: str) -> Any:
        found = FUNCTIONS[name](batch, FunctionContext())["advantages"]
        return found if isinstance(found, Ragged) else spread_over(found, lengths_S)

    def loss(name: str, told: dict[str, Any]) -> Any:
        leaf_T = logprobs_T.clone().requires_grad_()
        inputs = TokenInputs(
            leaf_T,
            old_T,
            advantages_T,
            clip_low=told.get("clip_ratio_low", 0.2),
            clip_high=told.get("clip_ratio_high", 0.2),
            dual_clip=told.get("clip_ratio_c", 3.0),
            tau_positive=told.get("tau_pos", 1.0),
            tau_negative=told.get("tau_neg", 1.05),
            sequences=sequences,  # a pack has them
        )
        return finish(leaf_T, OURS[name](inputs))

    def finish(leaf_T: Any, result: Any) -> Any:
        weights_T, normaliser = token_weights("token_mean", lengths_S)
        value = weighted_sum(weights_T, result.loss_T) / normaliser
        value.backward()
        return leaf_T.grad, [total.item() for total in result.sums.values()]

    def estimate() -> Any:
        return gae(responses.with_values(logprobs_T), responses.with_values(old_T), GAMMA, LAMBDA)

    def value_loss() -> Any:
        leaf_T = logprobs_T.clone().requires_grad_()
        result = value_clip(ValueInputs(leaf_T, advantages_T, old_T, VALUE_CLIP))
        return finish(leaf_T, result)

    for name in ADVANTAGES:
        yield f"advantage {name}", lambda name=name: advantage(name)
    yield "advantage gae", estimate
    yield "loss value_clip", value_loss
    for name, (_, told) in LOSSES.items():
        yield f"loss {name}", lambda name=name, told=told: loss(name, told)
    for name, (_, high) in CORRECTIONS.items():
        method, level = name.split()

        def corrected(method: str = method, level: str = level, high: float = high) -> Any:
            found = correct(logprobs_T, old_T, sequences, method, level, 1 / high, high)
            squares = torch.dot(found.weights_T, found.weights_T)
            return found.weights_T.sum().item() ** 2 / squares.item()

        yield f"correction {name}", corrected


def print_side(cases: Callable[[str], Iterator[tuple[str, Callable[[], Any]]]]) -> None:
    """Measures every case of a side, and prints them as a JSON line."""
    import torch

    torch.set_num_threads(1)
    keep_freed_memory()
    found = {s: {name: measure(call) for name, call in cases(s)} for s in ("full", "long-tailed")}
    for shape, timed in found.items():
        for name, call in cases(shape):
            timed[name] |= measure_memory(call)
    print(json.dumps({"seconds": [0.0], "cases": found}))


def compare(ours: dict[str, Any], verl: dict[str, Any]) -> dict[str, Any]:
    """Ratios of time and of peak memory for every shape and case."""
    return {
        shape: {
            name: {
                "hybridflow": mine,
                "verl": verl[shape][name],
                "time_ratio": mine["least"] / verl[shape][name]["least"],
                "memory_ratio": mine["peak"] / max(verl[shape][name]["peak"], 1),
            }
            for name, mine in cases.items()
        }
        for shape, cases in ours.items()
    }


def main() -> int:
    """Runs both sides; 0 when every function meets the target."""
    parser = argparse.ArgumentParser(description="advantages and losses beside verl's")
    parser.add_argument("--ours", action="store_true", help="run this project's side alone")
    if parser.parse_args().ours:
        print_side(ours)
        return 0
    python = verl_python()
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    mine = run_side(Path(sys.executable), "-m", "benchmarks.algorithms", "--ours")["cases"]
    theirs = run_side(python, "-m", "benchmarks.peers.verl_algorithms")["cases"]
    compared = compare(mine, theirs)
    slowest = max(case["time_ratio"] for cases in compared.values() for case in cases.values())
    report = {
        "samples": SAMPLES,
        "max_tokens": MAX_TOKENS,
        "tokens": {shape: sum(sizes_of(shape)) for shape in compared},
        "cores": cores,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "quiet": load < cores / 2,
        "target": TARGET,
        "slowest_ratio": slowest,
        "met": slowest <= TARGET,
        "cases": compared,
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    for shape, cases in compared.items():
        for name, case in cases.items():
            print(
                f"{shape:>11} {name:<32} {case['hybridflow']['least'] * 1e3:8.1f} ms, verl "
                f"{case['verl']['least'] * 1e3:8.1f} ms: {1 / case['time_ratio']:5.1f} times as "
                f"fast, {case['memory_ratio']:.2f} of its memory"
            )
    print(f"slowest: {slowest:.2f} of verl's time (target {TARGET}); load {load:.1f} on {cores}")
    return 0 if report["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
