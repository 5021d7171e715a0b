"""Which engine answers which prompt. Pure and deterministic.

A prompt goes to one engine with all of its samples, and equal prompts go together: the engine
computes their common prefix once. Groups of equal prompts are laid out largest first, each on the
engine with the least to do, so that no engine has more to do than another by more than the last
group that it was given.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def assign(prompts: Sequence[Hashable], costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The engine of each prompt.

    Args:
        prompts: what tells equal prompts from others, their token ids as a tuple say.
        costs: tokens that each prompt is expected to take; at least 0.
        loads: tokens that each engine has yet to do, by engine.

    Returns:
        An index into ``loads`` for each prompt.
    """
    assert len(prompts) == len(costs), "one cost per prompt"
    assert loads or not prompts, "prompts need an engine"
    groups: dict[Hashable, list[int]] = {}
    for position, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(position)
    total = {prompt: sum(costs[at] for at in places) for prompt, places in groups.items()}
    ahead = list(loads)
    engine_of = [0] * len(prompts)
    for prompt in sorted(groups, key=lambda prompt: (-total[prompt], groups[prompt][0])):
        engine = min(range(len(ahead)), key=lambda index: (ahead[index], index))
        ahead[engine] += total[prompt]
        for position in groups[prompt]:
            engine_of[position] = engine
    return engine_of


def expected_tokens(prompt_tokens: int, samples: int, max_tokens: int) -> int:
    """What a prompt may take: its own tokens once, and every sample's at their longest.

    A bound and no forecast: a forecast from earlier responses would make a resumed run route
    otherwise than the run that it goes on from.
    """
    return prompt_tokens + samples * max_tokens
