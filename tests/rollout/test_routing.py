"""Routing: equal prompts together, engines evenly loaded, the same answer every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rollout.routing import assign, expected_tokens

PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=2).map(tuple), st.integers(0, 50)), max_size=30
)
LOADS = st.lists(st.integers(0, 100), min_size=1, max_size=5)


@given(PROMPTS, LOADS)
def test_equal_prompts_go_together_and_no_engine_is_overloaded(asked, loads) -> None:
    prompts, costs = [prompt for prompt, _ in asked], [cost for _, cost in asked]
    engines = assign(prompts, costs, loads)
    assert len(engines) == len(prompts) and set(engines) <= set(range(len(loads)))
    assert len({(p, e) for p, e in zip(prompts, engines, strict=True)}) == len(set(prompts))
    group = {p: sum(c for q, c in asked if q == p) for p in prompts}
    after = list(loads)
    for cost, engine in zip(costs, engines, strict=True):
        after[engine] += cost
    for engine, load in enumerate(after):
        if given_ := [group[p] for p, e in zip(prompts, engines, strict=True) if e == engine]:
            assert load - min(given_) <= min(after)
    assert engines == assign(prompts, costs, loads)


@given(st.lists(st.integers(0, 1000), max_size=20), LOADS)
def test_an_order_of_other_names_changes_nothing(costs, loads) -> None:
    """Only equality of prompts counts, not what they are."""
    numbers, names = list(range(len(costs))), [f"prompt {n * 7}" for n in range(len(costs))]
    assert assign(numbers, costs, loads) == assign(names, costs, loads)


def test_the_busier_engine_waits() -> None:
    assert assign(["a", "b", "c"], [10, 10, 10], [25, 0]) == [1, 1, 1]
    assert assign(["a", "b", "a", "c"], [3, 5, 4, 1], [0, 0]) == [0, 1, 0, 1]
    assert assign([], [], []) == []


def test_a_prompt_counts_once_and_its_samples_each() -> None:
    assert expected_tokens(100, samples=8, max_tokens=50) == 500
