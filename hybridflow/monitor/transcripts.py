"""Sample rollouts in the report: best, worst and random ones of the first and the last step."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

from hybridflow.monitor.folder import first_rollouts, last_rollouts
from hybridflow.monitor.jsonl import Row
from hybridflow.monitor.page import escape
from hybridflow.monitor.text import number

_RANDOM_ROWS = 2
_MAX_CHARACTERS = 4000


def transcripts(folder: Path) -> str:
    """The section with the samples; empty when no rollout was recorded."""
    first, last = first_rollouts(folder), last_rollouts(folder)
    if not first:
        return ""
    parts = []
    groups = [("Last", last)] if _step(first) == _step(last) else [("Last", last), ("First", first)]
    for label, rows in groups:
        cards = "".join(_card(kind, row) for kind, row in choose(rows))
        heading = f"{label} step ({_step(rows)}): {len(rows):,} rollouts"
        parts.append(f'<h3 class="muted">{heading}</h3><div class="rollouts">{cards}</div>')
    return "<h2>Sample rollouts</h2>" + "<br>".join(parts)


def _step(rows: Sequence[Row]) -> str:
    return escape(" ".join(str(rows[0][key]) for key in ("stage", "step") if key in rows[0]))


def reward_of(row: Row) -> float | None:
    """The rollout's reward, None when it has none that is a finite number."""
    value = row.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def choose(rows: Sequence[Row], seed: int = 0) -> list[tuple[str, Row]]:
    """Best, worst and two random rows, then one of an evaluation; each row at most once.

    The choice is the same for the same rows and seed.
    """
    training = [index for index, row in enumerate(rows) if not row.get("evaluation")]
    scored = [index for index in training if reward_of(rows[index]) is not None]
    chosen: dict[int, str] = {}
    if scored:
        chosen[max(scored, key=lambda index: reward_of(rows[index]) or 0.0)] = "best"
        worst = min(scored, key=lambda index: reward_of(rows[index]) or 0.0)
        chosen.setdefault(worst, "worst")
    rest = [index for index in training if index not in chosen]
    generator = random.Random(seed)
    for index in generator.sample(rest, min(_RANDOM_ROWS, len(rest))):
        chosen[index] = "random"
    evaluated = [index for index, row in enumerate(rows) if row.get("evaluation")]
    if evaluated:
        chosen[generator.choice(evaluated)] = "evaluation"
    return [(kind, rows[index]) for index, kind in chosen.items()]


def _card(kind: str, row: Row) -> str:
    reward = reward_of(row)
    tone = "" if reward is None else ("good" if reward > 0 else "bad")
    shown = "no reward" if reward is None else f"reward {number(reward)}"
    badge = f'<span class="badge {tone}">{shown}</span>'
    head = (
        f'<div class="head"><h3>{kind}</h3>{badge}<span class="legend">{_facts(row)}</span></div>'
    )
    prompt = f'<pre class="prompt">{_text(row.get("prompt", ""))}</pre>'
    return f'<div class="card">{head}{prompt}<pre>{_text(row.get("response", ""))}</pre></div>'


def _facts(row: Row) -> str:
    facts = []
    if "length" in row:
        facts.append(f"{row['length']} tokens")
    if row.get("finished") is False:
        facts.append("cut off")
    if "version" in row:
        facts.append(f"weights {row['version']}")
    if row.get("answer") is not None:
        facts.append(f"answer {_short(row['answer'])}")
    rewards = row.get("rewards")
    if isinstance(rewards, dict):
        facts += [f"{name} {value}" for name, value in rewards.items()]
    return escape(" · ".join(facts))


def _short(value: object, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _text(value: object) -> str:
    text = str(value)
    if len(text) <= _MAX_CHARACTERS:
        return escape(text)
    hidden = len(text) - _MAX_CHARACTERS
    return escape(text[:_MAX_CHARACTERS]) + f"\n[{hidden:,} more characters in rollouts.jsonl]"
