"""Split and merge are inverse, give views, and cross processes without a copy."""

import gc
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool]


@st.composite
def batches(draw, min_prompts: int = 0) -> Batch:
    prompts = draw(st.integers(min_prompts, 6))
    groups = draw(st.integers(1, 3))
    lengths = [draw(st.integers(0, 5)) for _ in range(prompts * groups)]
    prompt_lengths = [draw(st.integers(0, 4)) for _ in range(prompts)]

    def ragged(sizes: list[int], *tail: int) -> Ragged:
        dtype = draw(st.sampled_from(DTYPES))
        offsets = torch.tensor([0, *sizes]).cumsum(0)
        values = torch.arange(sum(sizes)).reshape(-1, *[1 for _ in tail])
        return Ragged(values.expand(-1, *tail).to(dtype), offsets)

    return Batch(
        {
            "prompts": ragged(prompt_lengths),
            "rows": [{"answer": str(i)} for i in range(prompts)],
            "rewards": torch.randn(prompts * groups, 2).to(draw(st.sampled_from(DTYPES))),
            "responses": ragged(lengths),
            "logprobs": ragged(lengths, 3),
            "version": 7,
        },
        {
            "prompts": Axis.PROMPTS,
            "rows": Axis.PROMPTS,
            "rewards": Axis.SAMPLES,
            "responses": Axis.TOKENS,
            "logprobs": Axis.TOKENS,
            "version": Axis.RUN,
        },
        prompts,
        groups,
    )


@settings(deadline=None)
@given(batches(min_prompts=1), st.data())
def test_parts_in_another_order_are_those_rows(batch: Batch, data) -> None:
    """Views of one memory that do not lie one behind the other must not be joined as if."""
    order = data.draw(st.permutations(range(batch.prompts)))
    order = order[: data.draw(st.integers(1, batch.prompts))]
    pieces = [batch.slice(prompt, prompt + 1) for prompt in order]
    assert Batch.concat(pieces).equals(batch.take(order))


@given(batches(), st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_concat_is_the_inverse_of_split(batch: Batch, parts: int) -> None:
    pieces = batch.split(parts)
    sizes = [piece.prompts for piece in pieces]
    assert len(pieces) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert Batch.concat(pieces).equals(batch)
    assert Batch.concat([piece.clone() for piece in pieces]).equals(batch)


@given(batches(min_prompts=1), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_split_gives_views_and_concat_joins_neighbours_uncopied(batch: Batch, parts: int) -> None:
    pieces = batch.split(parts)
    for name in ("prompts", "responses", "logprobs"):
        storage = batch[name].values.untyped_storage().data_ptr()
        for piece in pieces:
            assert piece[name].values.untyped_storage().data_ptr() == storage
    whole = Batch.concat(pieces)
    contiguous = batch["rewards"].data_ptr()
    assert whole["rewards"].data_ptr() == contiguous
    assert pieces[0]["rewards"].data_ptr() == contiguous


@given(batches())
@settings(deadline=None, max_examples=40)
def test_pickle_round_trip_in_and_out_of_band(batch: Batch) -> None:
    assert pickle.loads(pickle.dumps(batch)).equals(batch)  # noqa: S301
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert pickle.loads(text, buffers=buffers).equals(batch)  # noqa: S301


def tokens_batch(lengths: list[int], dtype: torch.dtype = torch.float32) -> Batch:
    rows = [torch.full((length,), i).to(dtype) for i, length in enumerate(lengths)]
    field = Ragged.from_rows(rows)
    return Batch({"logprobs": field}, {"logprobs": Axis.TOKENS}, len(lengths), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_carries_its_own_rows_alone(dtype: torch.dtype) -> None:
    batch = tokens_batch([1000] * 100, dtype)
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(batch.slice(3, 5), protocol=5, buffer_callback=buffers.append)
    size = sum(buffer.raw().nbytes for buffer in buffers)
    assert size == 2 * 1000 * dtype.itemsize + 3 * 8
    assert len(text) < 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_read_only_buffers_are_shared_without_a_copy_or_a_warning(dtype: torch.dtype) -> None:
    batch = tokens_batch([3, 0, 5], dtype)
    batch = batch.with_field("rewards", Axis.SAMPLES, torch.tensor([1.0, 2.0, 3.0]))
    raw: list[pickle.PickleBuffer] = []
    text = pickle.dumps(batch, protocol=5, buffer_callback=raw.append)
    stored = [bytes(buffer) for buffer in raw]  # immutable, as what Ray's store hands out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = pickle.loads(text, buffers=stored)  # noqa: S301
    assert received.equals(batch)
    stored_spans = [memory_span(buffer) for buffer in stored]
    values = received["logprobs"].values
    assert any(start <= values.data_ptr() < end for start, end in stored_spans)
    del stored, raw
    gc.collect()
    assert received.equals(batch), "a received tensor keeps its memory alive"
    changed = received.clone()
    changed["rewards"].zero_()
    assert received["rewards"].tolist() == [1.0, 2.0, 3.0]


def memory_span(data: bytes) -> tuple[int, int]:
    start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return start, start + max(1, len(data))


def test_ragged_rows_slices_and_empty_rows() -> None:
    ragged = Ragged.from_rows([[1, 2, 3], [], [4], [5, 6]])
    assert ragged.dtype == torch.int64
    assert ragged.lengths.tolist() == [3, 0, 1, 2]
    assert ragged[0].tolist() == [1, 2, 3]
    assert ragged[-1].tolist() == [5, 6]
    assert [row.tolist() for row in ragged[1:3]] == [[], [4]]
    assert ragged[2:].offsets.tolist() == [0, 1, 3]
    assert len(ragged[3:1]) == 0
    assert ragged.take([3, 0]).equals(Ragged.from_rows([[5, 6], [1, 2, 3]]))
    assert ragged[1:3].values.data_ptr() == ragged.values[3:].data_ptr()
    assert Ragged.from_rows([[], []], torch.int64).values.shape == (0,)
    assert len(Ragged.from_rows([], torch.float32)) == 0
    assert ragged.with_values(ragged.values * 2)[0].tolist() == [2, 4, 6]
    with pytest.raises(IndexError, match="row 4 of 4"):
        ragged[4]
    with pytest.raises(ValueError, match="step 1"):
        ragged[::2]
    with pytest.raises(ValueError, match="pass dtype"):
        Ragged.from_rows([[], []])


@pytest.mark.parametrize(
    "values, offsets",
    [
        (torch.zeros(3), torch.tensor([0, 2])),
        (torch.zeros(3), torch.tensor([1, 3])),
        (torch.zeros(3), torch.tensor([0, 4, 3])),
        (torch.zeros(3), torch.tensor([0, 3], dtype=torch.int32)),
        (torch.zeros(3), torch.zeros(0, dtype=torch.int64)),
        (torch.tensor(1.0), torch.tensor([0, 1])),
    ],
)
def test_bad_offsets_are_refused(values: torch.Tensor, offsets: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="offsets|values"):
        Ragged(values, offsets)


@pytest.mark.parametrize(
    "data, axis",
    [
        (torch.zeros(3), Axis.PROMPTS),
        (torch.zeros(2), Axis.SAMPLES),
        (["a"], Axis.PROMPTS),
        (torch.tensor(1.0), Axis.SAMPLES),
        (torch.zeros(4), Axis.TOKENS),
        (Ragged.from_rows([[1], [2]]), Axis.TOKENS),
        (3, Axis.SAMPLES),
    ],
)
def test_a_field_that_does_not_fit_is_named(data: object, axis: Axis) -> None:
    with pytest.raises(ValueError, match="field 'broken'"):
        Batch({"broken": data}, {"broken": axis}, prompts=2, samples_per_prompt=2)


def test_tokens_fields_of_different_lengths_are_refused() -> None:
    batch = tokens_batch([2, 3])
    with pytest.raises(ValueError, match="'values': row 1 has 2 values where 'logprobs' has 3"):
        batch.with_field("values", Axis.TOKENS, Ragged.from_rows([[1, 2], [1, 2]]))


def test_fields_are_selected_renamed_and_joined() -> None:
    batch = tokens_batch([2, 3]).with_field("rewards", Axis.SAMPLES, torch.zeros(2))
    assert list(batch.select(["rewards"]).fields) == ["rewards"]
    assert list(batch.rename({"rewards": "scores"}).fields) == ["logprobs", "scores"]
    assert "rewards" in batch
    parts = batch.select(["rewards"]), batch.select(["logprobs"])
    assert parts[0].union(parts[1]).equals(batch)
    with pytest.raises(ValueError, match="did you mean 'rewards'"):
        batch.select(["reward"])
    with pytest.raises(ValueError, match="both batches have rewards"):
        batch.union(parts[0])
    with pytest.raises(ValueError, match="two fields would be named: rewards"):
        batch.rename({"logprobs": "rewards"})
    with pytest.raises(ValueError, match="no field 'reward'"):
        batch.rename({"reward": "scores"})
    with pytest.raises(ValueError, match="differ in: extra"):
        Batch({"extra": 1}, {})


def test_take_keeps_groups_together() -> None:
    batch = Batch(
        {"rewards": torch.arange(6.0), "prompts": Ragged.from_rows([[1], [2, 2], [3]])},
        {"rewards": Axis.SAMPLES, "prompts": Axis.PROMPTS},
        prompts=3,
        samples_per_prompt=2,
    )
    taken = batch.take([2, 0])
    assert taken["rewards"].tolist() == [4, 5, 0, 1]
    assert [row.tolist() for row in taken["prompts"]] == [[3], [1]]
    assert batch.take([]).prompts == 0


def test_concat_refuses_parts_that_differ() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Batch.concat([])
    with pytest.raises(ValueError, match="that differ"):
        Batch.concat([tokens_batch([1]), tokens_batch([1]).rename({"logprobs": "other"})])
    with pytest.raises(ValueError, match="field 'logprobs'.*dtypes"):
        Batch.concat([tokens_batch([1]), tokens_batch([1], torch.bfloat16)])
