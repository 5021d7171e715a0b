"""The order of prompts: each once an epoch, the same from any position."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.assets.quickstart import character_tokenizer
from hybridflow.data import PromptStream, load_dataset
from tests.data.settings import Settings

ROWS = 11


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "data.jsonl"
    rows = [{"prompt": str(i), "answer": str(i)} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(Settings(), character_tokenizer(), path)


def draw(stream, n):
    return [int(row.answer) for row in stream.next(n)]


def test_each_epoch_holds_every_row_once_in_another_order(dataset):
    stream = PromptStream(dataset, seed=3)
    epochs = [draw(stream, ROWS) for _ in range(3)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert stream.position == 3 * ROWS and stream.epoch == 3
    assert draw(PromptStream(dataset, seed=3), ROWS) == epochs[0]
    assert draw(PromptStream(dataset, seed=4), ROWS) != epochs[0]


def test_without_shuffle_the_files_order_repeats(dataset):
    stream = PromptStream(dataset, seed=0, shuffle=False)
    assert draw(stream, 9) + draw(stream, 4) == [*range(ROWS), 0, 1]


@given(sizes=st.lists(st.integers(1, ROWS), min_size=1, max_size=8), seed=st.integers())
def test_a_step_after_seek_is_the_step_that_was(dataset, sizes, seed):
    stream = PromptStream(dataset, seed)
    for size in sizes:
        position = stream.position
        rows = stream.next(size)
        resumed = PromptStream(dataset, seed)
        resumed.seek(position)
        assert resumed.next(size) == rows
        assert resumed.position == stream.position


def test_more_than_the_dataset_and_a_negative_position_are_refused(dataset):
    stream = PromptStream(dataset, seed=0)
    for n in (ROWS + 1, 0):
        with pytest.raises(ValueError, match=f"{n} prompts a step cannot be drawn from the 11"):
            stream.next(n)
    with pytest.raises(ValueError, match="at least 0"):
        stream.seek(-1)
    assert stream.position == 0
