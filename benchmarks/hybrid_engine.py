"""What going from training to generation costs one device, for layout pairs of Qwen3-8B.

    .venv/bin/python -m benchmarks.hybrid_engine

Prints the table and writes it into docs/weight_sync.md; a test fails when the page has another. It
counts bytes from config alone, in a second or two: no weights, no clock.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from hybridflow.weight_sync.layout import server_parameters
from megatron_bridge import translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import ReshardPlan, Seat, hybrid_engine, plan, route
from megatron_bridge.reshard.hybrid_engine import Engines, Transition

PAGE = Path(__file__).parents[1] / "docs" / "weight_sync.md"
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
PAIRS = (
    ("tp=8", 8),
    ("tp=8", 4),
    ("tp=8", 2),
    ("tp=8", 1),
    ("tp=4,pp=2", 4),
    ("tp=4,pp=2", 2),
    ("tp=2,pp=4,dp=2", 1),
    ("tp=8,pp=2,dp=2", 4),
)
"""The trainer's layout, and the servers' tp."""
_DEVICES = 8
_WIDTH = 110
_HEAD = (
    "| Trainer | Servers | DeepSpeed-Chat | OpenRLHF-like | HybridFlow-V | HybridFlow "
    "| Plan, consecutive ranks | Plan |"
)
_NOTE = """
Each cell is volume / peak / redundancy in GB. The four in the middle are formulas; the two on the
right count the plan's copies to SGLang's own parameters: servers on consecutive trainer ranks, and
on those that section 5 of the paper chooses (`assignment`), as a run does. Redundancy 0 says that
generation needs every byte of weights that training holds on the device, so that no byte is held
for training alone; a server in a process of its own, as SGLang is, holds its shard besides.
"""
_MARKS = re.compile(r"(<!-- hybrid-engine -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """The table and what its numbers mean, in Markdown."""
    rule = "|" + " --- |" * (_HEAD.count("|") - 1)
    return "\n".join(
        [
            _HEAD,
            rule,
            *(_row(*pair) for pair in PAIRS),
            "",
            textwrap.fill(" ".join(_NOTE.split()), _WIDTH),
        ]
    )


def _row(trainer: str, generation_tp: int) -> str:
    layout = ParallelLayout.parse(trainer)
    made = _planned(layout, generation_tp)
    model = made.model_bytes
    cells = (
        hybrid_engine.deepspeed_chat(model, layout),
        hybrid_engine.openrlhf(model, generation_tp),
        hybrid_engine.hybridflow_vanilla(model, layout),
        hybrid_engine.hybridflow(model, layout, generation_tp),
        _moved(made, generation_tp, hybrid_engine.vanilla),
        _moved(made, generation_tp, hybrid_engine.assignment),
    )
    servers = f"{layout.world // generation_tp} of tp={generation_tp}"
    return f"| {trainer} | {servers} | " + " | ".join(map(_cell, cells)) + " |"


def _planned(layout: ParallelLayout, generation_tp: int) -> ReshardPlan:
    config = translation.resolve(QWEN3_8B)
    targets = [
        server_parameters(config, tp=generation_tp, rank=rank, device="cuda")
        for rank in range(generation_tp)
    ]
    return plan(config, layout, targets)


def _moved(
    made: ReshardPlan, generation_tp: int, place: Callable[[ParallelLayout, int], Engines]
) -> Transition:
    layout = made.layout
    seats = [Seat(f"host {rank // _DEVICES}", rank % _DEVICES) for rank in range(layout.world)]
    engines = [[seats[rank] for rank in engine] for engine in place(layout, generation_tp)]
    return hybrid_engine.planned(route(made, seats, engines))


def _cell(found: Transition) -> str:
    return " / ".join(map(_gigabytes, found))


def _gigabytes(size: Fraction) -> str:
    return f"{float(size) / 1e9:.2f}" if size else "0"


def page() -> str:
    """docs/weight_sync.md with the table as it is now."""
    made, count = _MARKS.subn(rf"\g<1>{table()}\n\g<2>", PAGE.read_text(encoding="utf-8"))
    assert count == 1, f"{PAGE} lacks the marks of its table"
    return made


def main() -> int:
    """Prints and writes the table."""
    print(table())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
