"""Packs: every row once, no padding, next-token labels on responses alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.packing import bins_first_fit_decreasing, pack_rows
from hybridflow.batch import Ragged

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=20)


def test_one_pack_by_hand():
    prompts = Ragged.from_rows([[5, 6], [7, 8, 9]])
    responses = Ragged.from_rows([[11, 12], [13, 14, 15]])
    (pack,) = pack_rows(prompts, responses, max_tokens=99)
    assert pack.input_ids_T.tolist() == [7, 8, 9, 13, 14, 5, 6, 11]  # longest row first
    assert pack.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert pack.offsets_N.tolist() == [0, 5, 8] and pack.longest == 5
    assert pack.predict_R.tolist() == [2, 3, 4, 6, 7]
    assert pack.labels_R.tolist() == [13, 14, 15, 11, 12]
    assert pack.source_R.tolist() == [2, 3, 4, 0, 1]


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(15, 40))
def test_packs_hold_every_response_token_once(lengths, max_tokens):
    prompts = Ragged.from_rows([torch.arange(p) + 100 * i for i, (p, _) in enumerate(lengths)])
    responses = Ragged.from_rows(
        [torch.arange(r) + 100 * i + 50 for i, (_, r) in enumerate(lengths)], dtype=torch.int64
    )
    packs = pack_rows(prompts, responses, max_tokens)
    assert all(len(pack.input_ids_T) <= max_tokens for pack in packs)
    assert sum(len(pack.input_ids_T) for pack in packs) == sum(p + r - 1 for p, r in lengths if r)
    sources = torch.cat([pack.source_R for pack in packs] + [torch.zeros(0, dtype=torch.int64)])
    assert sources.sort().values.tolist() == list(range(len(responses.values)))
    for pack in packs:
        assert torch.equal(pack.labels_R, responses.values[pack.source_R])
        inner = pack.labels_R % 100 > 50  # all but the first token of a response
        before = pack.input_ids_T[pack.predict_R]
        assert torch.equal(before[inner], pack.labels_R[inner] - 1)
        assert (before[~inner] % 100 < 50).all()  # predicted from the prompt's last token
        sizes = pack.offsets_N.diff()
        assert (sizes.diff() <= 0).all() and int(sizes.max()) == pack.longest
        assert torch.equal(
            pack.position_ids_T, torch.cat([torch.arange(int(size)) for size in sizes])
        )


def test_first_fit_decreasing():
    assert bins_first_fit_decreasing([2, 5, 4, 3, 1], 6) == [[1, 4], [2, 0], [3]]
    assert bins_first_fit_decreasing([], 6) == []


def test_a_row_that_cannot_fit_is_named():
    responses = Ragged.from_rows([[1], [2, 3, 4]])
    with pytest.raises(ValueError, match="sample 1 has 6 tokens.*raise micro_batch_tokens"):
        pack_rows(Ragged.from_rows([[0], [0] * 4]), responses, 5)
    with pytest.raises(ValueError, match="prompt of sample 0 is empty"):
        pack_rows(Ragged.from_rows([[], [0] * 4]), responses, 9)


def test_samples_of_a_prompt_share_it():
    prompts = Ragged.from_rows([[1, 2], [3]])
    responses = Ragged.from_rows([[10], [11, 12], [], [14, 15, 16]])
    (pack,) = pack_rows(prompts, responses, max_tokens=99)
    assert pack.input_ids_T.tolist() == [1, 2, 11, 3, 14, 15, 1, 2]
    assert pack.labels_R.tolist() == [11, 12, 14, 15, 16, 10]


def test_no_rows_no_packs():
    nothing = Ragged.from_rows([], dtype=torch.int64)
    assert pack_rows(nothing, nothing, 5) == []
    assert pack_rows(Ragged.from_rows([[1]]), Ragged.from_rows([[]], dtype=torch.int64), 5) == []
