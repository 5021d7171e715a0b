"""Rewards from a service: a real server on loopback, well-behaved and not."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybridflow.rewards import Failure, RewardItem, Scorer


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Judge)
        self.seen: list[tuple[str, str | None, dict]] = []
        self.tries: Counter[str] = Counter()
        self.over = threading.Event()


class _Judge(BaseHTTPRequestHandler):
    """Gives each response its length; the path says how to misbehave."""

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append((self.path, self.headers.get("Authorization"), body))
        server.tries[self.path] += 1
        count = server.tries[self.path]
        rewards = [len(sample["response"]) for sample in body["samples"]]
        if self.path == "/hangs" and "bad" in str(body):
            server.over.wait(60)
        if self.path == "/flaky" and count < 3:
            return self.answer(b"busy", 503 if count == 1 else 429)
        if self.path == "/dies":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"rewards": [1')
            self.close_connection = True
            return None
        if self.path == "/drips":
            self.send_response(200)
            self.end_headers()
            while not server.over.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()
            return None
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/good")
            self.end_headers()
            return None
        texts = {
            "/garbage": b"<html>oops",
            "/list": b"[1, 2]",
            "/few": b'{"rewards": [1]}',
            "/nan": b'{"rewards": [1, NaN]}',
        }
        if self.path == "/tokens":
            rewards = [[0.5] * len(sample["tokens"]) for sample in body["samples"]]
        return self.answer(texts.get(self.path) or json.dumps({"rewards": rewards}).encode())

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(404 if self.path == "/missing" else status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def judge():
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()


def items(*responses: str) -> list[RewardItem]:
    return [RewardItem("2+2=", response, "4", {"id": 7}) for response in responses]


def scored(judge, path: str, *responses: str, **parameters):
    url = f"http://127.0.0.1:{judge.server_port}{path}"
    with Scorer("http", {"url": url, **parameters}, seconds_per_call=60) as scorer:
        scorer.wait_until_ready()
        return scorer.score(items(*responses), 60)


def test_batches_are_posted_and_rewards_come_back_in_order(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    before = len(judge.seen)
    responses = ["a" * n for n in range(10)]
    found = scored(judge, "/good", *responses, batch=4, token_env="JUDGE_TOKEN", send_row=True)
    assert found == [float(n) for n in range(10)]
    requests = judge.seen[before:]
    assert sorted(len(body["samples"]) for _, _, body in requests) == [2, 4, 4]
    assert {token for _, token, _ in requests} == {"Bearer secret"}
    expected = {"prompt": "2+2=", "response": "", "answer": "4", "row": {"id": 7}}
    assert expected in [sample for _, _, body in requests for sample in body["samples"]]


def test_a_busy_service_is_asked_again(judge):
    assert scored(judge, "/flaky", "abc", retries=2) == [3.0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/dies", "ended 986 bytes before the reply did"),
        ("/garbage", "no JSON: '<html>oops'"),
        ("/list", 'not {"rewards": [...]}'),
        ("/missing", "404"),
        ("/moved", "302"),
    ],
)
def test_a_service_that_does_not_answer_fails_its_samples(judge, path, text):
    found = scored(judge, path, "a", "b", retries=0)
    assert all(isinstance(outcome, Failure) and text in outcome.text for outcome in found), found


def test_a_reply_that_drips_is_late(judge):
    (found,) = scored(judge, "/drips", "a", retries=0, timeout_seconds=0.3)
    assert isinstance(found, Failure) and "no whole reply within 0.3 s" in found.text
    assert found.kind == "timeout", "one count for what was late, whoever looked at the clock"


def test_a_reply_without_a_number_fails_that_sample(judge):
    first, second = scored(judge, "/nan", "a", "b")
    assert first == 1.0
    assert isinstance(second, Failure) and "/nan: returned nan (float)" in second.text


def test_too_few_rewards_fail_the_samples_of_the_request(judge):
    found = scored(judge, "/few", "a", "b")
    assert all(isinstance(o, Failure) and "1 rewards for 2 samples" in o.text for o in found)


def test_requests_that_hang_cost_their_own_samples_alone(judge):
    url = f"http://127.0.0.1:{judge.server_port}/hangs"
    responses = ["bad", "bad", *["abc"] * 12, "bad"]
    before = judge.tries["/hangs"]
    with Scorer("http", {"url": url, "batch": 1, "calls_at_once": 2}, seconds_per_call=3) as scorer:
        found = scorer.score(items(*responses), 60)
        again = scorer.score(items("abc"), 60)
    assert found[2:14] == [3.0] * 12 and again == [3.0]
    late = [found[i] for i in (0, 1, 14)]
    assert [one.kind for one in late if isinstance(one, Failure)] == ["timeout"] * 3
    assert judge.tries["/hangs"] - before <= 13 + 3 * 3, "no try after the deadline"


def test_no_one_listens(judge):
    (found,) = scored(judge, "", "a", url="http://127.0.0.1:9/", retries=0)
    assert isinstance(found, Failure) and "ConnectionRefusedError" in found.text


def test_values_for_tokens(judge):
    url = f"http://127.0.0.1:{judge.server_port}/tokens"
    item = RewardItem("2+2=", "ab", "4", {}, tokens=("a", "b"))
    with Scorer("http", {"url": url}) as scorer:
        assert scorer.score([item], 60) == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"url": "ftp://judge/"}, "must be http"),
        ({"url": "http://me:word@judge/"}, "without a password"),
        ({"url": "http://judge/", "token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE is not set"),
        ({"url": "http://judge/", "batch": 0}, "1 or more"),
    ],
)
def test_settings_that_cannot_work_end_the_start(parameters, message):
    with Scorer("http", parameters) as scorer, pytest.raises(ValueError, match=message):
        scorer.wait_until_ready()
