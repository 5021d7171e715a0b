"""Weights from a trainer of TP2xPP2 to a real SGLang of TP2, by every transport and as others do.

    .venv/bin/python -m benchmarks.weight_sync

Two random Qwen3 models of 134 and 430 MB in float32. Each way publishes a few versions; beside it
stands one memcpy of the same bytes in the same run, and ways that gather whole tensors on trainer
rank 0.

Writes ``benchmarks/results/weight_sync.json``; exits 1 when a target is missed or the machine was
not quiet.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.convert_others import Others
from benchmarks.grpo_sides import installed
from benchmarks.watch import QUIET_CORES
from benchmarks.weight_sync_gather import GATHERS
from benchmarks.weight_sync_memory import ROOT
from benchmarks.weight_sync_report import show, verdicts
from benchmarks.weight_sync_ways import BUCKET, WAYS, Fleet, memcpy
from hybridflow.rollout.commands import SGLANG_PYTHON
from megatron_bridge import translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import huggingface_shapes

RESULT = ROOT / "benchmarks" / "results" / "weight_sync.json"
LAYOUT, TP = ParallelLayout(tp=2, pp=2), 2
_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "130M": _COMMON
    | {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "430M": _COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 3328,
    },
}
"""By their bytes."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    names = [*WAYS, *GATHERS]
    made = argparse.ArgumentParser(description="weight sync, beside one memcpy of the same bytes")
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    made.add_argument("--ways", nargs="+", choices=names, default=names, metavar="WAY")
    made.add_argument("--output", type=Path, default=RESULT)
    return made


def make(name: str, folder: Path) -> Path:
    """Write a random checkpoint in float32; its folder."""
    config, made = MODELS[name], folder / name
    made.mkdir()
    random = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.empty(shape).normal_(0, 0.02, generator=random)
        for key, shape in huggingface_shapes(translation.resolve(config)).items()
    }
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    (made / "config.json").write_text(json.dumps(config))
    return made


def measure(name: str, ways: list[str], folder: Path, console: Console) -> dict[str, Any]:
    """Everything about one model."""
    fleet = Fleet(make(name, folder), LAYOUT, TP, folder)
    try:
        traffic = fleet.wiring.routes.traffic()
        copies = memcpy(traffic.lower_bound)
        found: dict[str, Any] = {}
        for way in ways:
            found[way] = fleet.measure(way)
            shown = " ".join(f"{each['total']:.3f}" for each in found[way]["timed"])
            console.print(f"{name} {way}: {shown} s", highlight=False)
        copies += memcpy(traffic.lower_bound)
    finally:
        fleet.stop()
    return {
        "bytes": traffic.model,
        "lower_bound": traffic.lower_bound,
        "gathered": traffic.gathered,
        "memcpy": copies,
        "ways": found,
        "verdicts": verdicts(found, traffic.lower_bound, copies),
    }


def report(args: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Everything measured, and the verdicts."""
    load, others = os.getloadavg()[0], Others()
    measured = {name: measure(name, args.ways, folder, console) for name in args.models}
    cores = others.cores()
    judged = [each for model in measured.values() for each in model["verdicts"].values()]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count()},
        "versions": {
            "hybridflow": installed(Path(sys.executable), ("torch", "megatron-core")),
            "sglang": installed(SGLANG_PYTHON, ("torch", "sglang")),
        },
        "trainer": str(LAYOUT),
        "server": f"tp={TP}",
        "bucket": BUCKET,
        "load_before": load,
        "other_cores": cores,
        "quiet": cores <= QUIET_CORES,
        "met": all(each["met"] for each in judged),
        "models": measured,
    }


def main() -> int:
    """Runs everything; 0 when every target is met on a quiet machine."""
    args = parser().parse_args()
    torch.set_num_threads(1)
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that all ends too
    with tempfile.TemporaryDirectory(prefix="hybridflow-benchmark-") as scratch:
        found = report(args, Path(scratch), console)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    aside = args.output.with_suffix(".json.new")
    aside.write_text(json.dumps(found, indent=1) + "\n")
    aside.rename(args.output)
    show(console, found)
    return 0 if found["met"] and found["quiet"] else 1


if __name__ == "__main__":
    sys.exit(main())
