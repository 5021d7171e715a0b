"""What a scoring process writes of a batch is what its worker reads, and nothing else gets in."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rewards import RewardItem
from hybridflow.rewards.ledger import Ledger, ledger_memory

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def item(tokens: int | None) -> RewardItem:
    return RewardItem("", "", "", {}, None if tokens is None else ("t",) * tokens)


@given(
    st.lists(st.tuples(NUMBERS, st.sampled_from(["wait", "begin", "score", "fail"])), max_size=9)
)
def test_states_and_values_of_whole_responses(samples):
    items = [item(None) for _ in samples]
    memory = ledger_memory(items)
    with Ledger(os.dup(memory), items) as reads, Ledger(memory, items) as writes:
        for index, (value, what) in enumerate(samples):
            if what != "wait":
                writes.begin([index])
            if what == "score":
                writes.score(index, value)
            elif what == "fail":
                writes.fail(index)
        told = [what for _, what in samples]
        assert reads.scored() == {i: v for i, (v, what) in enumerate(samples) if what == "score"}
        assert [*reads.under_way()] == [i for i, what in enumerate(told) if what == "begin"]
        assert (reads.moves() == 0) == (set(told) <= {"wait"})


@given(st.lists(st.lists(NUMBERS, max_size=5), min_size=1, max_size=6))
def test_values_of_tokens(values):
    items = [item(len(row)) for row in values]
    memory = ledger_memory(items)
    with Ledger(os.dup(memory), items) as reads, Ledger(memory, items) as writes:
        for index in reversed(range(len(values))):
            writes.begin([index])
            writes.score(index, values[index])
        assert reads.scored() == dict(enumerate(values))


def test_the_memory_can_be_neither_written_as_a_file_nor_cut():
    items = [item(None)]
    memory = ledger_memory(items)
    with Ledger(os.dup(memory), items) as ledger:
        for spoil in (
            lambda: os.write(memory, b"nonsense"),
            lambda: os.ftruncate(memory, 0),
            lambda: os.ftruncate(memory, 1 << 20),
        ):
            with pytest.raises(PermissionError):
                spoil()
        assert ledger.scored() == {} and ledger.moves() == 0
    os.close(memory)
