"""The adaptive KL coefficient by hand, and beside verl's controller."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.adaptive_kl import adaptive_coefficient

FIGURES = json.loads((Path(__file__).parent / "reference_figures.json").read_text())["adaptive_kl"]


@pytest.mark.parametrize(
    ("kl", "wanted"),
    [
        (6.0, 0.2),  # on target: it stays
        (6.6, 0.2 * 1.01),  # e = 0.1, K = 0.1
        (5.4, 0.2 * 0.99),
        (60.0, 0.2 * 1.02),  # e is bounded by 0.2
        (0.0, 0.2 * 0.98),
        (-1.0, 0.2 * 0.98),  # an estimate of k1 may be negative
    ],
)
def test_by_hand(kl: float, wanted: float) -> None:
    """Ziegler et al., section 2.2, whose K is 0.1: 64 samples a step, a horizon of 640."""
    given = adaptive_coefficient(0.2, kl, target=6.0, horizon=640, samples=64)
    assert given == pytest.approx(wanted, rel=1e-12)


def test_figures_of_verl() -> None:
    coef = FIGURES["coef"]
    for kl, wanted in zip(FIGURES["kl"], FIGURES["values"], strict=True):
        coef = adaptive_coefficient(
            coef, kl, FIGURES["target"], FIGURES["horizon"], FIGURES["samples"]
        )
        assert coef == pytest.approx(wanted, rel=1e-12)


@given(st.floats(0, 1e3), st.floats(1e-6, 1e2), st.integers(1, 4096), st.floats(1, 1e3))
def test_it_answers_in_the_right_direction_and_never_changes_sign(
    kl: float, target: float, samples: int, steps: float
) -> None:
    new = adaptive_coefficient(1.0, kl, target, horizon=samples * steps, samples=samples)
    assert 0.8 - 1e-9 <= new <= 1.2 + 1e-9  # rounding
    assert (new > 1) <= (kl > target) and (new < 1) <= (kl < target)
