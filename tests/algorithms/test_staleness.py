"""Staleness from the version of every token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.staleness import (
    StaleSamples,
    oldest_versions,
    require,
    staleness,
    staleness_metrics,
)
from hybridflow.batch import Ragged

_ROWS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6)


def _ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows(rows, torch.int64)


@given(_ROWS, st.integers(9, 12))
def test_the_oldest_token_counts(rows: list[list[int]], current: int):
    versions = _ragged(rows)
    expected = [min(row, default=current) for row in rows]
    assert oldest_versions(versions, current).tolist() == expected
    assert staleness(versions, current).tolist() == [current - oldest for oldest in expected]
    found = staleness_metrics(versions, current)
    flat = [version for row in rows for version in row]
    assert found["staleness_max"] == max((current - e for e in expected), default=0)
    assert found["stale_tokens"] == pytest.approx(
        sum(v < current for v in flat) / max(len(flat), 1)
    )


@given(_ROWS, st.integers(0, 12), st.integers(0, 12))
def test_required_staleness(rows: list[list[int]], current: int, most: int):
    allowed = all(0 <= current - version <= most for row in rows for version in row)
    if allowed:
        require(_ragged(rows), current, most)
    else:
        with pytest.raises(StaleSamples, match=f"the trainer's {current} and at most {most}"):
            require(_ragged(rows), current, most)


def test_samples_and_versions_are_named():
    versions = _ragged([[7, 7], [5, 6, 6], [], [8]])
    with pytest.raises(StaleSamples, match=r"2 of 4 .* \(sample 1: 5, 6; sample 3: 8\)"):
        require(versions, current=7, staleness_max=1)
    with pytest.raises(StaleSamples, match=r"sample 4: 1; and 4 more\)"):
        require(_ragged([[1]] * 9), current=7, staleness_max=0)
