"""What every test run needs: one thread, Ctrl-C that works, and SGLang that really ran."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from pathlib import Path

import hypothesis
import pytest

from hybridflow.rollout.commands import SGLANG_PYTHON
from tests.own_names import own_names  # noqa: F401  (a fixture)
from tests.servers import (  # noqa: F401  (fixtures)
    local_server,
    rollout_server,
    sglang_server,
    tiny_model,
)

REQUIRE_SGLANG = "HYBRIDFLOW_REQUIRE_SGLANG"
_FORKING = {"bridge", "megatron"}
"""Rooms whose tests fork ranks from this process (`tests.ranks`). A fork is safe only while the
process has one thread: before any test has started Ray or a process group in it."""
_ROOT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("hybridflow", deadline=None)
hypothesis.settings.load_profile("hybridflow")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts its background jobs with SIGINT ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _SglangRecord:
    """Which `sglang` tests ran and which were skipped."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "sglang" in report.keywords:
            if report.skipped:
                self.skipped.add(report.nodeid)
            elif report.when == "call":
                self.ran.add(report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the record of SGLang's tests as a plug-in."""
    config.pluginmanager.register(_SglangRecord(), "sglang-record")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork come first; SGLang's are skipped without its venv, unless required."""
    items.sort(key=lambda item: not _FORKING & set(item.path.parts))
    _skip_sglang(items)


def _skip_sglang(items: list[pytest.Item]) -> None:
    """Without SGLang's venv its tests are skipped, unless they are required: then they fail."""
    if SGLANG_PYTHON.is_file() or os.environ.get(REQUIRE_SGLANG):
        return
    skip = pytest.mark.skip(reason=f"{SGLANG_PYTHON} does not exist: run `make sglang`")
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(skip)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that requires SGLang's tests and did not run them."""
    if not os.environ.get(REQUIRE_SGLANG) or session.config.option.collectonly:
        return
    if hasattr(session.config, "workerinput"):
        return  # one of several workers: the process that hears of every test's end judges
    record = session.config.pluginmanager.get_plugin("sglang-record")
    faults = [f"skipped: {name}" for name in sorted(record.skipped)]
    if not record.ran and _whole_suite(session.config):
        faults.append("no test marked `sglang` ran")
    if faults:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\n{REQUIRE_SGLANG} is set, but " + "; ".join(faults), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _whole_suite(config: pytest.Config) -> bool:
    chosen = {Path(argument).resolve() for argument in config.args}
    return bool(chosen & {_ROOT, _ROOT / "tests"}) and not config.option.keyword
