"""The inverse-CDF sampler draws the distribution that it says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rollout.local.sampler import draw, uniforms

V = 7


def _draw(logits, uniform, temperature=1.0, top_p=1.0, top_k=V):
    rows = len(uniform)
    return draw(
        logits.expand(rows, -1).clone(),
        uniform,
        torch.full((rows,), float(temperature)),
        torch.full((rows,), float(top_p)),
        torch.full((rows,), top_k),
    )


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -4.0, 1.0, 0.5])
    grid = (torch.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = _draw(logits, grid, temperature=0.8)
    want = torch.softmax(logits / 0.8, 0)
    counts = torch.bincount(tokens, minlength=V) / len(grid)
    torch.testing.assert_close(counts, want, atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs, want.log()[tokens], atol=1e-5, rtol=0)


def test_top_k_and_top_p_cut_but_do_not_change_logprobs():
    logits = torch.log(torch.tensor([0.05, 0.4, 0.25, 0.1, 0.1, 0.06, 0.04]))
    grid = (torch.arange(1000) + 0.5) / 1000
    tokens, logprobs = _draw(logits, grid, top_k=2)
    assert set(tokens.tolist()) == {1, 2}
    assert abs((tokens == 1).float().mean() - 0.4 / 0.65) < 2e-3
    torch.testing.assert_close(logprobs, logits[tokens], atol=1e-5, rtol=0)
    tokens, _ = _draw(logits, grid, top_p=0.6)
    assert set(tokens.tolist()) == {1, 2}
    tokens, _ = _draw(logits, grid, top_p=0.01)
    assert set(tokens.tolist()) == {1}


def test_rows_keep_their_own_settings():
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(
        logits.clone(),
        torch.full((4,), 0.999),
        torch.tensor([0.0, 1.0, 0.5, 0.0]),
        torch.tensor([1.0, 1.0, 0.1, 1.0]),
        torch.tensor([V, 1, V, V]),
    )
    assert tokens.tolist() == logits.argmax(-1).tolist()
    scale = torch.tensor([1.0, 1.0, 2.0, 1.0])[:, None]
    want = torch.log_softmax(logits * scale, -1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, want)


@given(
    st.lists(st.floats(-200, 200, width=32), min_size=V, max_size=V),
    st.floats(0, 1, exclude_max=True, width=32),
)
def test_a_token_without_mass_is_never_drawn(logits, uniform):
    row = torch.tensor(logits)
    tokens, logprobs = _draw(row, torch.tensor([uniform]))
    assert 0 <= int(tokens) < V
    assert (row - row.max()).exp()[tokens] > 0
    assert torch.isfinite(logprobs).all()


def test_uniforms_are_a_function_of_the_seed():
    assert torch.equal(uniforms(5, 8), uniforms(5, 16)[:8])
    assert not torch.equal(uniforms(5, 8), uniforms(6, 8))
    numbers = uniforms(3, 10_000)
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.02


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(number, temperature):
    logits = torch.tensor([0.3, -1.0, number, 0.0, float("-inf"), 1.0, 0.5])
    with pytest.raises(FloatingPointError, match="2 of 2 rows are not finite"):
        _draw(logits, torch.tensor([0.2, 0.9]), temperature=temperature)
