"""Packs: every response token once, no padding, prompts shared, next-token labels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.packing import Pack, bins_first_fit_decreasing, pack_rows
from hybridflow.batch import Ragged


def sequences(pack: Pack) -> list[list[int]]:
    """The whole sequences, as attention sees them."""
    ids = pack.input_ids_T if pack.expand_E is None else pack.input_ids_T[pack.expand_E]
    return [row.tolist() for row in ids.split(pack.offsets_N.diff().tolist())]


def test_rows_that_share_nothing():
    prompts = Ragged.from_rows([[5, 6], [7, 8, 9]])
    responses = Ragged.from_rows([[11, 12], [13, 14, 15]])
    (pack,) = pack_rows(prompts, responses, max_tokens=99)
    assert pack.input_ids_T.tolist() == [7, 8, 9, 13, 14, 5, 6, 11]  # longest row first
    assert pack.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert pack.offsets_N.tolist() == [0, 5, 8] and pack.longest == 5
    assert pack.expand_E is None and pack.place_T is None
    assert pack.predict_R.tolist() == [2, 3, 4, 6, 7]
    assert pack.labels_R.tolist() == [13, 14, 15, 11, 12]
    assert pack.source_R.tolist() == [2, 3, 4, 0, 1]


def test_samples_of_a_prompt_share_it():
    prompts = Ragged.from_rows([[1, 2], [3]])
    responses = Ragged.from_rows([[10], [11, 12], [], [14, 15, 16]])
    (pack,) = pack_rows(prompts, responses, max_tokens=99)
    assert pack.input_ids_T.tolist() == [1, 2, 11, 3, 14, 15]
    assert pack.position_ids_T.tolist() == [0, 1, 2, 0, 1, 2]
    assert sequences(pack) == [[1, 2], [1, 2, 11], [3, 14, 15]] and pack.longest == 3
    assert pack.place_T is not None and pack.place_T.tolist() == [0, 1, 4, 5, 6, 7]
    assert pack.predict_R.tolist() == [1, 1, 2, 3, 4, 5]
    assert pack.labels_R.tolist() == [10, 11, 12, 14, 15, 16]
    (apart,) = pack_rows(prompts, responses, max_tokens=99, share_prompts=False)
    assert apart.expand_E is None and sorted(sequences(apart)) == sorted(sequences(pack))


GROUPS = st.integers(1, 4).flatmap(
    lambda group: st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), min_size=group, max_size=group)),
        min_size=1,
        max_size=8,
    )
)


@settings(deadline=None, max_examples=100)
@given(GROUPS, st.integers(15, 40), st.booleans())
def test_packs_hold_every_response_token_once(groups, max_tokens, share):
    lengths = [(p, r) for p, group in groups for r in group]
    prompts = Ragged.from_rows([torch.arange(p) + 1000 * i for i, (p, _) in enumerate(groups)])
    responses = Ragged.from_rows(
        [torch.arange(r) + 100 * i + 50 for i, (_, r) in enumerate(lengths)], dtype=torch.int64
    )
    packs = pack_rows(prompts, responses, max_tokens, share_prompts=share)
    assert all(len(pack.input_ids_T) <= max_tokens for pack in packs)
    sources = torch.cat([pack.source_R for pack in packs] + [torch.zeros(0, dtype=torch.int64)])
    assert sources.sort().values.tolist() == list(range(len(responses.values)))

    wanted = [
        (prompts[i // len(groups[0][1])].tolist() + response.tolist())[:-1]
        for i, response in enumerate(responses)
        if len(response)
    ]
    assert sorted(row for pack in packs for row in sequences(pack)) == sorted(wanted)
    for pack in packs:
        assert torch.equal(pack.labels_R, responses.values[pack.source_R])
        sizes = pack.offsets_N.diff().tolist()
        assert max(sizes) == pack.longest
        positions_E = torch.cat([torch.arange(size) for size in sizes])
        places_T = torch.arange(len(pack.input_ids_T))
        if pack.expand_E is not None and pack.place_T is not None:
            assert torch.equal(pack.expand_E[pack.place_T], places_T)
            assert torch.equal(pack.position_ids_T[pack.expand_E], positions_E)
        else:
            assert torch.equal(pack.position_ids_T, positions_E)
        # The labels of a sequence are one whole response.
        owners = torch.bucketize(pack.source_R, responses.offsets, right=True) - 1
        whole = owners[torch.cat([torch.ones(1), pack.sequence_R.diff()]) > 0]
        assert torch.equal(owners, whole[pack.sequence_R])
        assert torch.equal(pack.responses_N, responses.lengths[whole])
        # A label's predecessor is the response token before it, or the prompt's last token.
        first = torch.isin(pack.source_R, responses.offsets)
        before = pack.input_ids_T[pack.predict_R]
        assert torch.equal(before[~first], pack.labels_R[~first] - 1)
        rows = torch.bucketize(pack.source_R[first], responses.offsets, right=True) - 1
        ends = prompts.offsets[rows // len(groups[0][1]) + 1] - 1
        assert torch.equal(before[first], prompts.values[ends])


def test_first_fit_decreasing():
    assert bins_first_fit_decreasing([2, 5, 4, 3, 1], 6) == [[1, 4], [2, 0], [3]]
    assert bins_first_fit_decreasing([], 6) == []


def test_a_group_too_large_for_a_pack_is_split():
    prompts = Ragged.from_rows([[1, 2, 3]])
    responses = Ragged.from_rows([[4, 5, 6], [7, 8, 9], [10, 11, 12]])
    packs = pack_rows(prompts, responses, max_tokens=7)
    assert [pack.input_ids_T.tolist() for pack in packs] == [
        [1, 2, 3, 4, 5, 7, 8],
        [1, 2, 3, 10, 11],
    ]


def test_a_row_that_cannot_fit_is_named():
    responses = Ragged.from_rows([[1], [2, 3, 4]])
    with pytest.raises(ValueError, match="sample 1 has 6 tokens.*raise micro_batch_tokens"):
        pack_rows(Ragged.from_rows([[0], [0] * 4]), responses, 5)
    with pytest.raises(ValueError, match="prompt of sample 0 is empty"):
        pack_rows(Ragged.from_rows([[], [0] * 4]), responses, 9)


def test_no_rows_no_packs():
    nothing = Ragged.from_rows([], dtype=torch.int64)
    assert pack_rows(nothing, nothing, 5) == []
    assert pack_rows(Ragged.from_rows([[1]]), Ragged.from_rows([[]], dtype=torch.int64), 5) == []


@settings(deadline=None, max_examples=60)
@given(GROUPS, st.booleans())
def test_whole_groups_lie_in_one_pack_one_behind_the_other(groups, share):
    lengths = [max(1, r) for _, group in groups for r in group]
    prompts = Ragged.from_rows([torch.arange(p) for p, _ in groups])
    responses = Ragged.from_rows([torch.arange(r) for r in lengths])
    group = len(lengths) // len(groups)
    packs = pack_rows(prompts, responses, 70, share_prompts=share, whole_groups=True)
    held = torch.cat([pack.rows_N for pack in packs]).view(-1, group)
    assert torch.equal(held, held[:, :1] + torch.arange(group)) and len(held) == len(groups)
    assert torch.equal(held[:, 0].sort().values, torch.arange(len(groups)) * group)


def test_a_group_that_fits_no_pack_is_named():
    prompts = Ragged.from_rows([[1], [2, 3]])
    responses = Ragged.from_rows([[4], [5], [6, 7, 8], [6, 7, 8]])
    with pytest.raises(ValueError, match="samples 2 to 3, .* have 6 tokens .*max_tokens"):
        pack_rows(prompts, responses, 5, whole_groups=True)
    assert len(pack_rows(prompts, responses, 5)) == 2


@settings(deadline=None, max_examples=60)
@given(GROUPS, st.randoms(use_true_random=False))
def test_only_trained_tokens_are_predicted(groups, chance):
    lengths = [r for _, group in groups for r in group]
    prompts = Ragged.from_rows([torch.arange(p) for p, _ in groups])
    responses = Ragged.from_rows([torch.arange(r) for r in lengths], dtype=torch.int64)
    trained_T = torch.tensor([chance.random() < 0.5 for _ in responses.values], dtype=torch.bool)
    whole = pack_rows(prompts, responses, 40)
    masked = pack_rows(prompts, responses, 40, trained_T=trained_T)
    for all_of_it, some in zip(whole, masked, strict=True):
        kept_R = trained_T[all_of_it.source_R]
        assert torch.equal(all_of_it.input_ids_T, some.input_ids_T)
        for name in ("predict_R", "labels_R", "source_R", "sequence_R"):
            assert torch.equal(getattr(all_of_it, name)[kept_R], getattr(some, name)), name
        assert int(some.responses_N.sum()) == int(kept_R.sum())
