"""Faults of the control section."""

from pathlib import Path

import pytest

from hybridflow.recipe.checks import check_file


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("control={host: 0.0.0.0}", "opens the port to other machines, without a token"),
        ("control={host: node-1}", "opens the port to other machines, without a token"),
        ("control={token_env: my-token}", "does not name an environment variable"),
        ("control={port: 70000}", "`control.port` must be less than or equal to 65535"),
        ("control={prot: 1}", "unknown key 'prot'"),
    ],
)
def test_faults(workspace: Path, override: str, what: str) -> None:
    found = [str(fault) for fault in check_file("recipe.yaml", [override])[1]]
    assert len(found) == 1 and what in found[0], found


@pytest.mark.parametrize(
    "override",
    ["control={}", "control={host: '::1'}", "control={host: 10.0.0.1, token_env: A_TOKEN}"],
)
def test_sound(workspace: Path, override: str) -> None:
    assert not check_file("recipe.yaml", [override])[1]
