"""Runs over two hosts: Ray started by launch/'s scripts in two networks that share no memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hybridflow.assets import make_quickstart
from hybridflow.cluster import LocalSession, processes
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.monitor import read_events, read_metrics, read_rollouts
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe
from hybridflow.weight_sync.wiring import planned
from tests.dataflow.commands import TrainCommand
from tests.dataflow.conftest import recipe_of
from tests.two_hosts import Host, TwoHosts, refusal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(refusal() is not None, reason=str(refusal())),
]

ROOT = Path(__file__).parents[2]
PORT = 6379
APART = ["cluster.nodes=2", "cluster.devices_per_node=1"]
BUCKETED = "roles.rollout.sync={mode: bucketed, bucket: 40KiB}"
TOGETHER = [f"roles.{role}.parallel.dp=2" for role in ("actor", "rollout")]
TOGETHER += ["roles.rollout.colocate=actor"]


@dataclass(frozen=True)
class Cluster:
    """A Ray of one slot on each host; `home` has its token."""

    hosts: TwoHosts
    home: Path

    @property
    def both(self) -> tuple[Host, Host]:
        return self.hosts.first, self.hosts.second

    def run(self, recipe: Path, *overrides: str) -> TrainCommand:
        """`hybridflow train` on the first host."""
        host = self.hosts.first
        return TrainCommand(
            recipe,
            *overrides,
            f"--address={host.address}:{PORT}",
            deadline=400,
            prefix=host.command(),
            environment=_environment(self.home),
        )

    def sent(self) -> int:
        """Bytes that have crossed, both ways."""
        return sum(host.sent() for host in self.both)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    home = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))  # Unix sockets need a short path
    try:
        with TwoHosts() as hosts:
            first, second = hosts.first, hosts.second
            _start("ray_head.sh", first, home, str(PORT), f"--temp-dir={home}/ray")
            _start("ray_worker.sh", second, home, f"{first.address}:{PORT}")
            yield Cluster(hosts, home)
    finally:
        shutil.rmtree(home)


def _start(script: str, host: Host, home: Path, *words: str) -> None:
    """Run a script of launch/ until its node is up; the end of the host ends it."""
    options = [f"--node-ip-address={host.address}", "--block", "--num-cpus=1"]
    command = [str(ROOT / "launch" / script), *words, *options]
    log = home / f"{script}.log"
    with log.open("wb") as output:
        node = subprocess.Popen(
            host.command(*command, "--object-store-memory=100000000"),
            env=_environment(home),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 300
    while "Ray runtime started" not in log.read_text():
        assert node.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def _environment(home: Path) -> dict[str, str]:
    """This process's, without what a Ray of its own has put there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "HOME": str(home)}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data."""
    folder = tmp_path_factory.mktemp("assets") / "quickstart"
    make_quickstart(folder)
    return folder


@pytest.fixture(scope="module")
def alone(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the recipe's run in this process."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = load_recipe(_recipe(assets, folder), ())
    return train(compile_recipe(recipe), lambda logs: LocalSession(), LaunchOptions(live=False))


def _recipe(assets: Path, folder: Path) -> Path:
    """The tiny recipe with a reward that every step has something to learn from."""
    told = recipe_of(assets, folder / "run")
    told["roles"]["reward"] = {"function": "length", "parameters": {"budget": 1, "slack": 5}}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    return path


def _learned(folder: Path) -> tuple[list[Any], list[Any]]:
    """Metrics without those of the clock, of memory and of what was published, and samples."""
    skipped = ("seconds", "throughput/", "memory/", "publish/")
    metrics = [
        {k: v for k, v in row["metrics"].items() if not any(part in k for part in skipped)}
        for row in read_metrics(folder)
    ]
    rows = [(row["prompt"], row["response"], row["version"]) for row in read_rollouts(folder)]
    return metrics, rows


def _roles(host: Host) -> set[str]:
    """Roles whose workers run on a host."""
    found = set()
    for process in host.processes():
        try:
            mark = process.environ().get(processes.MARK, "")
        except psutil.Error:
            continue
        found |= {role for role in mark.split("/")[1:2] if role}
    return found


@pytest.mark.parametrize("way", [[], [BUCKETED]], ids=["standby", "bucketed"])
def test_actor_and_rollout_on_two_hosts_learn_what_one_host_learns(
    way: list[str], cluster: Cluster, assets: Path, alone: Path, tmp_path: Path
) -> None:
    recipe = _recipe(assets, tmp_path)
    before = cluster.sent()
    run = cluster.run(recipe, *APART, *way)
    run.wait_for(
        "an actor and a rollout on different hosts",
        lambda: (
            [_roles(host) & {"actor", "rollout"} for host in cluster.both]
            in ([{"actor"}, {"rollout"}], [{"rollout"}, {"actor"}])
        ),
    )
    assert run.wait() == 0, run.output
    crossed = cluster.sent() - before
    assert not run.left_over()
    assert [_roles(host) for host in cluster.both] == [set(), set()]
    folder = tmp_path / "run"
    learned = _learned(folder)
    assert learned == _learned(alone)
    assert all(metrics["update/grad_norm"] > 0 for metrics in learned[0])
    _check_versions(folder)
    traffic = planned(compile_recipe(load_recipe(recipe, [*APART, *way])), "cpu").routes.traffic()
    assert traffic.total.network == traffic.lower_bound == traffic.needed
    assert crossed > 4 * traffic.needed


def test_each_host_has_a_rank_of_the_actor_and_a_server(
    cluster: Cluster, assets: Path, tmp_path: Path
) -> None:
    recipe = _recipe(assets, tmp_path)
    run = cluster.run(recipe, *APART, *TOGETHER)
    run.wait_for(
        "an actor's rank and a rollout on either host",
        lambda: all(
            "actor" in roles and roles & {"rollout-0", "rollout-1"}
            for roles in map(_roles, cluster.both)
        ),
    )
    assert run.wait() == 0, run.output
    assert [_roles(host) for host in cluster.both] == [set(), set()]
    _check_versions(tmp_path / "run")


def _check_versions(folder: Path) -> None:
    """Every version reached every server, proven, at the first try."""
    last = read_metrics(folder)[-1]["metrics"]
    assert last["weights/version"] == 4
    assert last["update/staleness_max"] == 0
    assert last["update/rollout_gap_max"] < 1e-4
    kinds = {event["kind"] for event in read_events(folder)}
    assert not kinds & {"quarantine", "repair", "behind", "error"}
