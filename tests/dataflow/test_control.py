"""The control port: what it answers, whom it refuses, and that nobody can hurt the run by it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.cluster import LocalSession
from hybridflow.dataflow.between_steps import BetweenSteps, Errand
from hybridflow.dataflow.control import Pulse, StepRecord, listening, totals_of
from hybridflow.dataflow.control import server as control_server
from hybridflow.dataflow.control.prometheus import exposition
from hybridflow.dataflow.control.routes import health
from hybridflow.dataflow.control.server import ControlServer, Reply, Request
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.runner import SerialRunner
from hybridflow.dataflow.state import StateConflict
from hybridflow.monitor import read_events, read_metrics
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.graph import Graph
from hybridflow.recipe.schema_control import ControlSection

SECONDS = 60.0


def echo(request: Request) -> Reply:
    return Reply(200, {"parameter": request.parameter, "body": request.body})


def broken(request: Request) -> Reply:
    raise ZeroDivisionError("one over zero")


def no_json(request: Request) -> Reply:
    return Reply(200, {"limit": float("inf")})


ROUTES = {
    ("GET", "/echo"): echo,
    ("POST", "/echo"): echo,
    ("POST", "/thing/*/do"): echo,
    ("GET", "/broken"): broken,
    ("GET", "/no_json"): no_json,
}


@contextmanager
def serving(token: str | None = None, host: str = "127.0.0.1") -> Iterator[ControlServer]:
    server = ControlServer(host, 0, token)
    server.start(ROUTES)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def open_server() -> Iterator[ControlServer]:
    with serving() as server:
        yield server


def ask(server: ControlServer, method: str, path: str, **options: Any) -> requests.Response:
    return requests.request(method, server.url + path, timeout=SECONDS, **options)


def raw(server: ControlServer, data: bytes) -> bytes:
    """The whole answer to some bytes, after which nothing more is sent."""
    with closing(socket.create_connection(server.server_address[:2], SECONDS)) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := client.recv(1 << 16):
                answer += part
        except ConnectionResetError:
            pass
        return answer


def test_routes(open_server: ControlServer) -> None:
    assert ask(open_server, "GET", "/echo?x=1").json() == {"parameter": "", "body": None}
    told = ask(open_server, "POST", "/thing/it is/do", json={"a": 1}).json()
    assert told == {"parameter": "it%20is", "body": {"a": 1}}


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/ecko", 404, "no endpoint /ecko; did you mean '/echo'"),
        ("GET", "/thing//do", 404, "no endpoint"),
        ("GET", "/thing/a/b/do", 404, "no endpoint"),
        ("DELETE", "/echo", 405, "/echo takes GET, POST, not DELETE"),
        ("BREW", "/echo", 501, "Unsupported method"),
        ("GET", "/broken", 500, "the driver's log has it"),
        ("GET", "/no_json", 500, "the driver's log has it"),
        ("GET", "/" + "x" * 70_000, 414, "Too Long"),
    ],
)
def test_wrong_requests_get_a_clear_answer(
    open_server: ControlServer, method: str, path: str, status: int, message: str
) -> None:
    answer = ask(open_server, method, path)
    assert answer.status_code == status and message in answer.json()["error"]
    assert ask(open_server, "GET", "/echo").ok


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is no JSON"),
        (b"\xff\xfe\x00", 400, "the body is no JSON"),
        (b'{"a": 1, "a": 2}', 400, "a key occurs twice"),
        (b"[" * 60_000, 400, "the body is no JSON"),
        (b"9" * 60_000, 400, "the body is no JSON"),
        (b" " * (control_server.MAX_BODY + 1), 413, "at most 65536 bytes"),
        (b" " * (8 << 20), 413, ""),
    ],
)
def test_bodies(open_server: ControlServer, body: bytes, status: int, message: str) -> None:
    try:
        answer = ask(open_server, "POST", "/echo", data=body)
    except requests.ConnectionError:  # a body that is not even read to its end
        assert len(body) > 1 << 20
    else:
        assert answer.status_code == status and message in answer.json()["error"]
    assert ask(open_server, "GET", "/echo").ok


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Length: -1", b"400"),
        (b"Content-Length: 1e3", b"400"),
        (b"Content-Length: " + b"9" * 5000, b"400"),
        (b"Transfer-Encoding: chunked", b"411"),
        (b"X: " + b"y" * 70_000, b"431"),
        (b"\r\n".join(b"X-%d: y" % n for n in range(200)), b"431"),
    ],
)
def test_heads(open_server: ControlServer, head: bytes, status: bytes) -> None:
    answer = raw(open_server, b"POST /echo HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")
    assert answer.split(b" ")[1] == status
    assert ask(open_server, "GET", "/echo").ok


@settings(max_examples=40)
@given(st.one_of(st.binary(max_size=300), st.from_regex(rb"[A-Z]+ /[a-z]* HTTP/[0-9.]+\r\n.*")))
def test_any_bytes_leave_it_whole(open_server: ControlServer, data: bytes) -> None:
    raw(open_server, data)
    assert ask(open_server, "GET", "/echo").ok


def test_slow_clients_do_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are served at once hold their connection; their time over, others get in."""
    monkeypatch.setattr(control_server, "CLIENT_SECONDS", 2.0)
    with serving() as server:
        address = server.server_address[:2]
        silent = [
            socket.create_connection(address, SECONDS) for _ in range(control_server.MOST_CLIENTS)
        ]
        for client in silent:
            client.sendall(b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\n1")
        with contextlib.suppress(OSError):  # its answer may be lost with its connection
            assert ask(server, "GET", "/echo").status_code == 503
        ends = [client.recv(100) for client in silent]  # each ends, with or without an answer
        assert len(ends) == len(silent)
        for client in silent:
            client.close()
        over = threading.Event()
        for _ in range(int(SECONDS)):
            with contextlib.suppress(requests.ConnectionError):
                if ask(server, "GET", "/echo").ok:
                    break
            over.wait(1)
        else:
            pytest.fail(f"no answer within {SECONDS:g} s after every slow client was gone")


def test_a_token_is_needed_where_there_is_one() -> None:
    with serving(token="secret") as server:
        for told in ({}, *({"Authorization": f"Bearer{t}"} for t in ("", " wrong", " secret2"))):
            assert ask(server, "GET", "/echo", headers=told).status_code == 401, told
        for scheme in ("Bearer", "bearer"):
            assert ask(server, "GET", "/echo", headers={"Authorization": f"{scheme} secret"}).ok
        assert ask(server, "GET", "/nothing").status_code == 401, "it tells nothing to strangers"


def test_web_pages_cannot_use_it(open_server: ControlServer) -> None:
    """A page that a browser of this machine shows may send requests, by a name of its own too."""
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example:80"}):
        answer = ask(open_server, "POST", "/echo", headers=headers)
        assert answer.status_code == 403 and "loopback" in answer.json()["error"]
    for host in ("localhost:1", "LOCALHOST.", "127.0.0.2", "[::1]:80"):
        assert ask(open_server, "GET", "/echo", headers={"Host": host}).ok, host
    assert ask(open_server, "GET", "/echo", headers={"Host": "[::1"}).status_code == 400


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with serving(host="::1") as server:
        assert server.url.startswith("http://[::1]:") and ask(server, "GET", "/echo").ok


SAMPLE = re.compile(
    r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (NaN|[+-]Inf|-?[0-9.]+(?:e[+-]\d+)?)'
)


def parsed(text: str) -> dict[tuple[str, str], float]:
    """The samples of an exposition, every line of which must be of the format."""
    found: dict[tuple[str, str], float] = {}
    declared: set[str] = set()
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# TYPE "):
            declared.add(line.split()[2])
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] in declared and (match[1], match[2]) not in found
        found[match[1], match[2]] = float(match[3])
    return found


@given(
    st.dictionaries(st.text(max_size=8), st.floats(), max_size=4),
    st.dictionaries(st.text(max_size=8), st.floats(0, 1e6), max_size=3),
)
def test_the_exposition_is_of_its_format(metrics: dict, nodes: dict) -> None:
    record = StepRecord('a "stage"\n', 1, 1, {"reward/mean": 0.5, **metrics}, nodes, 2.0)
    found = parsed(exposition("run\\name", record, 0.25, {"kl_coef": 1e-9}, {}, {}))
    labels = 'run="run\\\\name",stage="a \\"stage\\"\\n"'
    assert found["ppo_reward_mean", labels] == 0.5
    assert found["hybridflow_state", f'{labels},name="kl_coef"'] == 1e-9
    assert sum(name == "hybridflow_metric" for name, _ in found) == len({"reward/mean", *metrics})


def test_metrics_that_not_every_step_has_stay_and_failures_add_up() -> None:
    pulse = Pulse()
    failed = {"reward/reward/errors": 2.0, "reward/reward/a/timeouts": 1.0, "reward/kl": 0.5}
    before = StepRecord("warm_start", 1, 1, {"update/loss": 9.0, "eval/reward/x/errors": 1.0})
    pulse.beat(before, totals_of(before))
    for metrics in ({"eval/reward": 0.25, **failed}, {"update/tokens": 7.0, **failed}):
        record = StepRecord("main", 1, 1, metrics)
        pulse.beat(record, totals_of(record))
    found = parsed(exposition("run", record, 0.0, {}, *pulse.since_the_start()))
    labels = 'run="run",stage="main"'
    assert found["eval_reward_mean", labels] == 0.25
    assert found["ppo_kl_divergence", labels] == 0.5, "the KL that the reward pays"
    assert ("ppo_policy_loss", labels) not in found, "of another stage"
    totals = {"steps": 3, "reward_errors": 5, "reward_timeouts": 2, "response_tokens": 7}
    for name, total in totals.items():
        assert found[f"hybridflow_{name}_total", 'run="run"'] == total


class Visitor(SerialRunner):
    """Runs nodes one by one and, between those of each step, visits the control port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.visits: list[dict[str, Any]] = []
        self.url = ""

    def run(self, graph: Graph, nodes: Any, run_node: Any) -> None:
        super().run(graph, nodes, run_node)
        self.url = json.loads((self._folder / "control.json").read_text())["url"]
        self.visits.append(self._visit())

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=SECONDS)

    def patch(self, body: Any) -> requests.Response:
        return requests.patch(self.url + "/v1/state", json=body, timeout=SECONDS)

    def reload(self, role: str, body: Any) -> requests.Response:
        return requests.post(self.url + f"/v1/reward/{role}/reload", json=body, timeout=SECONDS)

    def _visit(self) -> dict[str, Any]:
        seen: dict[str, Any] = {
            "health": self.get("/health"),
            "metrics": self.get("/metrics"),
            "models": self.get("/v1/models"),
        }
        if len(self.visits) == 0:
            told = {"values": {"actor_lr": 5e-4, "max_tokens": 3}, "by": "a test", "version": 0}
            seen["accepted"] = self.patch(told)
            seen["late"] = self.patch(told)
            seen["reloads"] = [
                self.reload("reward", {"parameters": {"strip": False}, "by": "a test"}),
                self.reload("reward", {}),
                self.reload("rewrad", {}),
                self.reload("reward", {"parameters": 1}),
                self.reload("reward", {"parameter": {}}),
            ]
            seen["fixed"] = self.patch({"values": {"step": 1, "top_p": 0.5}})
            seen["refused"] = [
                self.patch(body)
                for body in (
                    {"values": {"top_p": 0.5, "temperature": 99}},
                    {"values": {"temprature": 1.0}},
                    {"values": {"temperature": 10**400}},
                    {"value": {"temperature": 1.0}},
                    {"values": {}, "verison": 1},
                    {"values": {}, "version": "1"},
                    {"values": {}, "by": "a\nb"},
                    [],
                )
            ]
        return seen


def test_during_a_run(make_recipe, tmp_path: Path) -> None:
    told = (
        "control={}",
        "cluster.peak_tflops=0.5",
        "warm_start=null",
        "roles.actor.optimizer.schedule=constant",
        "steps=2",
    )
    plan = compile_recipe(make_recipe(*told))
    visitor = Visitor(tmp_path / "run")
    folder = train(plan, lambda logs: LocalSession(), LaunchOptions(live=False), visitor)
    first, second = visitor.visits

    assert first["health"].status_code == 200 and first["health"].json()["global_step"] == 0
    health = second["health"].json()
    assert (health["status"], health["stage"], health["step"]) == ("running", "main", 1)

    rows = [row["metrics"] for row in read_metrics(folder)]
    assert not any(name.startswith("ppo_") for name, _ in parsed(first["metrics"].text))
    wanted = {
        *("reward/mean", "reward/std", "reward/max", "length/mean", "length/truncated"),
        *("advantage/mean", "advantage/std", "advantage/zero_share", "update/clip_fraction"),
        *("update/entropy_estimate", "update/grad_norm", "update/rollout_gap_max"),
        *("throughput/tokens_per_second", "throughput/mfu", "generate/seconds"),
    }
    assert wanted <= rows[0].keys()
    used = rows[0]["throughput/update_tflops"]
    assert used > 0 and rows[0]["throughput/mfu"] == pytest.approx(used / 0.5)
    labels = 'run="tiny",stage="main"'
    found = parsed(second["metrics"].text)
    assert found["ppo_reward_mean", labels] == rows[0]["reward/mean"]
    assert found["actor_grad_norm", labels] == rows[0]["update/grad_norm"]
    assert found["actor_generation_seconds", labels] == rows[0]["generate/seconds"]
    assert found["hybridflow_step", labels] == 1
    named = f'{labels},name="update/loss"'
    assert found["hybridflow_metric", named] == rows[0]["update/loss"]

    roles = second["models"].json()["roles"]
    assert set(roles) == {"actor", "rollout", "reward"}
    assert roles["actor"]["kind"] == "model" and roles["actor"]["layout"]["tp"] == 1
    assert roles["rollout"]["version"] == 2 and roles["rollout"]["engines"] == {
        "rollout": "serving"
    }
    assert roles["reward"]["functions"] == {"reward": "exact_match"}
    done = """reload of 'reward' with {"strip": false} by a test at 127.*: done$"""
    assert re.match(done, roles["reward"]["reload"])
    assert roles["reward"]["parameters"] == {"reward": {"strip": False}}
    rate = roles["actor"]["values"]["actor_lr"]
    assert (rate["value"], rate["low"], rate["high"]) == (5e-4, 0, 1.0)

    accepted = first["accepted"].json()
    assert (accepted["version"], accepted["version_in_force"]) == (1, 0)
    assert accepted["values"]["actor_lr"]["next"] == 5e-4
    assert first["late"].status_code == first["fixed"].status_code == 409
    assert "for version 0, but the live values have version 1" in first["late"].json()["error"]
    assert "'step' is fixed" in first["fixed"].json()["error"]
    assert [answer.status_code for answer in first["reloads"]] == [202, 409, 404, 422, 422]
    assert "did you mean 'reward'" in first["reloads"][2].json()["error"]
    texts = [answer.json()["error"] for answer in first["refused"]]
    assert [answer.status_code for answer in first["refused"]] == [422] * len(texts)
    assert "'temperature' = 99 is out of bounds: it is between 0.01 and 10" in texts[0]
    assert "did you mean 'temperature'" in texts[1]

    assert (rows[0]["update/lr"], rows[1]["update/lr"]) == (1e-3, 5e-4)
    assert rows[1]["length/max"] <= 3
    assert rows[1]["state/actor_lr"] == 5e-4
    events = {event["kind"]: event["text"] for event in read_events(folder)}
    assert events["control"].startswith(visitor.url)
    assert events["state"].startswith("version 1 by a test at 127.0.0.1: actor_lr 0.001 -> 0.0005")
    assert not (folder / "control.json").exists()
    with pytest.raises(requests.ConnectionError):
        visitor.get("/health")


def test_errands_run_once_and_may_fail() -> None:
    told: list[tuple[str, str]] = []
    between = BetweenSteps()

    def broken() -> None:
        raise ValueError("no such thing")

    def work() -> None:
        assert between.status("a") == "work: before the next step", "it has not ended"
        with pytest.raises(StateConflict):
            between.ask("a", Errand("again", lambda: None))

    between.ask("a", Errand("work", work))
    between.ask("b", Errand("more", broken))
    with pytest.raises(StateConflict, match="work is to happen before the next step"):
        between.ask("a", Errand("again", lambda: None))
    assert between.status("a") == "work: before the next step" and between.status("c") == ""
    between.run("errand", lambda kind, text: told.append((kind, text)))
    between.run("errand", lambda kind, text: told.append((kind, text)))
    assert told == [("errand", "work: done"), ("errand", "more: failed; no such thing")]
    assert between.status("b") == "more: failed; no such thing"


def test_a_run_that_stands_still_is_not_healthy() -> None:
    pulse = Pulse()
    pulse.beat(StepRecord("main", 3, 5), {})
    assert health(pulse, stall_seconds=3600).status == 200
    answer = health(pulse, stall_seconds=0.0)
    assert answer.status == 503 and answer.content["status"] == "stalled"
    assert (answer.content["step"], answer.content["global_step"]) == (3, 5)


def test_the_port_tells_its_health_while_the_workers_start() -> None:
    """A liveness probe must not end a run that loads its models."""
    with listening(ControlSection()) as server:
        assert server is not None
        answer = ask(server, "GET", "/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "starting")
        answer = ask(server, "PATCH", "/v1/state", json={"values": {}})
        assert answer.status_code == 503 and "workers are starting" in answer.json()["error"]
        assert ask(server, "GET", "/v2").status_code == 404
    with listening(ControlSection(stall_seconds=1e-9)) as server:
        assert server is not None
        assert ask(server, "GET", "/health").status_code == 503


def test_an_address_or_token_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(**told: Any) -> None:
        with listening(ControlSection(**told)):
            pass

    monkeypatch.delenv("A_TOKEN", raising=False)
    with pytest.raises(ValueError, match="the environment has no A_TOKEN"):
        listen(token_env="A_TOKEN")
    with pytest.raises(ValueError, match="control.host: other machines need a token"):
        listen(host="0.0.0.0")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ValueError, match="control: 127.0.0.1:.* cannot be listened on"),
    ):
        listen(port=taken.getsockname()[1])
    monkeypatch.setenv("A_TOKEN", "geheiß")
    with pytest.raises(ValueError, match="use ASCII letters"):
        listen(token_env="A_TOKEN")
    monkeypatch.setenv("A_TOKEN", "secret\n")
    with listening(ControlSection(token_env="A_TOKEN")) as server:
        assert server is not None and server.token == "secret"
    monkeypatch.setenv("A_TOKEN", "secret")
    listen(token_env="A_TOKEN", host="0.0.0.0")
