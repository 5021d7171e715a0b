"""The commands as a shell starts them: entry points, start-up, torchrun."""

import json
import os
import subprocess
import sys

import pytest

from tests.bridge_cli.checkpoints import DEADLINE, fail, succeed, write_qwen3


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE, env=environment, check=False
    )


def test_help_and_mistakes_import_no_torch():
    script = (
        "import sys\n"
        "from {0}.cli import main\n"
        "try: main(['convert', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    for package in ("megatron_bridge", "hybridflow"):
        done = _run("-c", script.format(package))
        assert done.returncode == 0, done.stderr
        assert "--memory" in done.stdout


@pytest.mark.slow
def test_ranks_of_torchrun_share_the_work(tmp_path):
    source = write_qwen3(tmp_path / "source", hidden_size=256)
    there = tmp_path / "there"
    # So little memory makes small units, and enough of them for both.
    arguments = ("-m", "megatron_bridge", "convert", source, there, "--memory", "64MiB", "--json")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = _run(*torchrun, *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "megatron", "rank 0 alone tells"
    files = {path.name for path in (there / "release").glob("*.distcp")}
    assert {"__0_", "__1_"} <= {name[:4] for name in files}, "both wrote"
    succeed("diff", source, there)
    failed = _run(*torchrun, *arguments)
    assert failed.returncode != 0
    assert "--overwrite" in failed.stderr
    assert "--overwrite" in fail(*arguments[2:])
