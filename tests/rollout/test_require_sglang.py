"""A run that must include SGLang's tests fails when they did not run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_MARKED = "import pytest\n\n@pytest.mark.sglang\ndef test_marked():\n    {body}\n"


@pytest.mark.parametrize(
    ("body", "arguments", "required", "status"),
    [
        ("pytest.skip('no reason')", ["tests"], True, 1),
        ("pytest.skip('no reason')", ["tests"], False, 0),
        (None, ["tests"], True, 1),
        (None, ["tests/test_plain.py"], True, 0),
    ],
)
def test_the_runs_status(tmp_path: Path, body, arguments, required: bool, status: int):
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("conftest.py", "own_names.py", "servers.py"):
        shutil.copy(_ROOT / "tests" / name, folder)
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    (folder / "test_plain.py").write_text("def test_plain():\n    pass\n")
    if body is not None:
        (folder / "test_marked.py").write_text(_MARKED.format(body=body))
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "HYBRIDFLOW_REQUIRE_SGLANG": ""}
    if required:
        environment["HYBRIDFLOW_REQUIRE_SGLANG"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("HYBRIDFLOW_REQUIRE_SGLANG is set, but" in done.stdout) == bool(status)
