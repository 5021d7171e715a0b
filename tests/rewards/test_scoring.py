"""Scoring under deadlines: order, failures that stay with their sample, errors that name it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybridflow.cluster.processes import MARK, marked
from hybridflow.rewards import Failure, RewardError, RewardItem, Scorer
from hybridflow.rewards import scorer as scorer_module
from hybridflow.rewards.output import SHOWN_BYTES

FILE = Path(__file__).with_name("functions_that_misbehave.py")


def items(*responses: str) -> list[RewardItem]:
    return [RewardItem("2+2=", response, "4", {"answer": "4"}) for response in responses]


def outcomes(name: str, *responses: str, seconds: float = 60, per_call: float = 60, **parameters):
    with Scorer(f"{FILE}:{name}", parameters, seconds_per_call=per_call) as scorer:
        scorer.wait_until_ready()
        found = scorer.score(items(*responses), seconds)
        again = scorer.score(items("good"), 60)
    assert again == [1.0], "the next batch is scored, whatever became of this one"
    return found


def test_rewards_come_in_the_order_of_the_items():
    with Scorer("exact_match") as scorer:
        assert scorer.score(items("4", "5", "4"), 60) == [1.0, 0.0, 1.0]
        assert scorer.score([], 60) == []


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("raises", "error", "raised KeyError: 'units' ("),
        ("raises_without_text", "error", "raised _Unspeakable"),
        ("says_much", "error", "raised ValueError: xxx"),
        ("exits", "error", "raised SystemExit: 3"),
        ("leaves", "error", "ended its process with exit code 3"),
        ("kills_itself", "error", "ended its process by SIGKILL"),
        ("cancels_itself", "error", "raised CancelledError"),
        ("exits_later", "error", "raised SystemExit: 3"),
    ],
)
def test_a_failure_is_of_its_sample_alone(name, kind, text):
    first, bad, last = outcomes(name, "good", "bad", "good")
    assert (first, last) == (1.0, 1.0)
    assert isinstance(bad, Failure) and bad.kind == kind and text in bad.text
    assert len(bad.text) < 3000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hangs", "in hangs"),
        ("holds_the_interpreter", "in holds_the_interpreter"),
        ("waits", "did not end within 0.3 s"),
        ("will_not_be_cancelled", "did not end within 0.3 s"),
        ("hears_no_signal", "did not end within 0.3 s"),
    ],
)
def test_a_sample_that_takes_too_long_costs_itself_alone(name, text):
    first, bad, last = outcomes(name, "good", "bad", "good", per_call=0.3)
    assert (first, last) == (1.0, 1.0)
    assert isinstance(bad, Failure) and bad.kind == "timeout" and text in bad.text


def test_async_calls_run_beside_each_other_and_a_blocked_loop_is_seen():
    assert outcomes("blocks_the_others", *["good"] * 100, per_call=60) == [1.0] * 100
    found = outcomes("blocks_the_others", "good", "bad", per_call=1.0)
    assert isinstance(found[1], Failure) and "in blocks_the_others" in found[1].text


@pytest.mark.parametrize("name", ["forks", "forks_and_hangs", "starts_a_session"])
def test_a_fork_scores_nothing_twice_and_is_ended(name, monkeypatch):
    monkeypatch.setenv(MARK, f"test-of-forks-{os.getpid()}")
    assert outcomes(name, "good", "bad", "good") == [1.0, 1.0, 1.0]
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children())}
    left = [p for p in marked(f"test-of-forks-{os.getpid()}") if p.pid not in ours]
    psutil.wait_procs(left, timeout=60)
    assert not [process for process in left if process.is_running()]


def test_the_batch_has_a_deadline_too():
    found = outcomes("slow", *["good"] * 40, seconds=1.0)
    assert found[0] == 1.0
    last = found[-1]
    assert isinstance(last, Failure) and last.kind == "timeout" and "batch's 1 s" in last.text


@pytest.mark.parametrize(("value", "reward"), [(True, 1.0), (3, 3.0), (-0.5, -0.5), (3e38, 3e38)])
def test_bool_and_int_count_as_numbers(value, reward):
    (result,) = outcomes("returns", "bad", value=value)
    assert result == reward and type(result) is float


@pytest.mark.parametrize("value", [None, "1", "nan", "infinite", "huge", "object", [1.0], 1e39])
def test_anything_else_is_an_error_that_names_function_and_sample(value):
    with pytest.raises(RewardError, match=r"misbehave.py:returns', sample 1 .*'bad'.*: returned"):
        outcomes("returns", "good", "bad", "good", value=value)


def test_after_an_error_the_scorer_goes_on_with_the_next_batch():
    with Scorer(f"{FILE}:returns", {"value": None}) as scorer:
        with pytest.raises(RewardError):
            scorer.score(items("bad", *["good"] * 50), 60)
        assert scorer.score(items("good", "good"), 60) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "returned 2 values for 3 tokens"),
        (1.0, "not a list of 3 numbers"),
        ("abc", "not a list of 3 numbers"),
        ([1.0, None, 2.0], "returned None .* for token 1"),
    ],
)
def test_token_rewards_are_one_for_each_token(values, message):
    tokens = RewardItem("2+2=", "bad", "4", {}, tokens=("b", "a", "d"))
    with (
        Scorer(f"{FILE}:returns", {"value": values}) as scorer,
        pytest.raises(RewardError, match=message),
    ):
        scorer.score([tokens], 60)


def test_a_batch_that_fails_costs_its_samples():
    found = outcomes("Batches", "good", "good", "good", "bad", "good", how="raise")
    assert [found[i] for i in (0, 1, 4)] == [1.0, 1.0, 1.0]
    assert all(isinstance(found[i], Failure) for i in (2, 3))


def test_an_exception_in_the_place_of_a_number_is_a_failure_of_that_sample():
    found = outcomes("Batches", "good", "good", "good", "bad", how="one")
    assert found[:3] == [1.0, 1.0, 1.0]
    assert isinstance(found[3], Failure) and "raised OSError: no answer" in found[3].text


def test_samples_of_one_row_do_not_see_what_another_one_wrote_into_it():
    row = {"list": [1]}
    with Scorer(f"{FILE}:writes_into_its_row") as scorer:
        assert scorer.score([RewardItem("", "a", "", row)] * 3, 60) == [3.0, 3.0, 3.0]


def test_messages_hold_no_control_characters():
    found = outcomes("raises_controls", "bad")[0]
    assert isinstance(found, Failure) and "clear \\x1b[2J, half \\ud800, ünï" in found.text


def test_a_process_that_loads_longer_than_a_step_goes_on_loading(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        f"import os, time\nflag = {str(tmp_path / 'flag')!r}\n"
        "time.sleep(3 if os.path.exists(flag) else 0)\nopen(flag, 'w').close()\n"
        "def fn(prompt, response, answer, row):\n"
        "    return os._exit(1) if response == 'bad' else 1.0\n"
    )
    with Scorer(f"{path}:fn") as scorer:
        scorer.wait_until_ready()
        assert all(isinstance(o, Failure) for o in scorer.score(items("bad", "a"), 0.5))
        loading = scorer._process
        last = scorer.score(items("a"), 0.5)[0]
        assert isinstance(last, Failure) and last.kind == "timeout"
        assert scorer.score(items("a"), 60) == [1.0] and scorer._process is loading


@pytest.mark.parametrize(
    ("how", "message"), [("count", "1 results for 2"), ("none", "None"), ("text", "'11'")]
)
def test_a_batch_gives_as_many_results_as_samples(how, message):
    with pytest.raises(RewardError, match=rf"Batches', sample 2 .*returned {message}"):
        outcomes("Batches", "good", "good", "good", "bad", how=how)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "could not be made: raised RuntimeError: no weights"),
        ("leave", "while loading, ended its process with exit code 4"),
        ("hang", "was not loaded within 0.5 s"),
    ],
)
def test_a_reward_that_does_not_load_says_why(how, message):
    seconds = 0.5 if how == "hang" else 60
    with (
        Scorer(f"{FILE}:NeverMade", {"how": how}, start_seconds=seconds) as scorer,
        pytest.raises(ValueError, match=message),
    ):
        scorer.wait_until_ready()


def test_a_process_that_takes_the_place_of_another_runs_the_same_code(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os\ndef fn(p, r, a, row):\n    return os._exit(1) if r == 'bad' else 1.0\n"
    )
    with Scorer(f"{path}:fn") as scorer:
        scorer.wait_until_ready()
        path.write_text("def fn(p, r, a, row):\n    return -7.0\n")
        first, second = scorer.score(items("bad", "b"), 60)
        assert isinstance(first, Failure) and "exit code 1" in first.text and second == 1.0
    with Scorer(f"{path}:fn") as scorer:
        assert scorer.score(items("b"), 60) == [-7.0]


def test_a_function_that_cannot_be_loaded_again_fails_the_rest(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        f"import os\nflag = {str(tmp_path / 'flag')!r}\n"
        "assert not os.path.exists(flag), 'no licence'\n"
        "def fn(p, r, a, row):\n    return os._exit(1) if r == 'bad' else 2.0\n"
    )
    with Scorer(f"{path}:fn") as scorer:
        scorer.wait_until_ready()
        (tmp_path / "flag").touch()
        first, second = scorer.score(items("bad", "b"), 60)
        assert isinstance(first, Failure) and "exit code 1" in first.text
        assert isinstance(second, Failure) and "could not be loaded again" in second.text
        (tmp_path / "flag").unlink()
        assert scorer.score(items("a"), 60) == [2.0]


@pytest.mark.parametrize("name", ["writes_nonsense", "speaks_out_of_turn"])
def test_what_a_process_writes_into_its_messages_harms_that_process_alone(name):
    found = outcomes(name, "good", "bad", "good")
    assert found[0] == 1.0 and found[2] == 1.0


def test_no_sample_is_scored_twice_when_another_one_ends_the_process(tmp_path):
    responses = ["a", "b", "bad", "c", "bad", "d"]
    row = {"notes": str(tmp_path / "notes")}
    with Scorer(f"{FILE}:notes_and_leaves") as scorer:
        found = scorer.score([RewardItem("", r, "", row) for r in responses], 60)
    assert [isinstance(outcome, Failure) for outcome in found] == [r == "bad" for r in responses]
    assert (tmp_path / "notes").read_text().split() == responses


def test_samples_that_hang_cost_their_deadline_each():
    found = outcomes("hangs", "bad", "good", "bad", per_call=0.3)
    assert found[1] == 1.0
    assert [f.kind for f in found if isinstance(f, Failure)] == ["timeout", "timeout"]


def test_what_is_printed_goes_to_the_log_as_far_as_it_does_not_fill_it(capfd):
    with Scorer(f"{FILE}:prints") as scorer:
        assert scorer.score(items("good", "bad", "next"), 60) == [1.0] * 3
        assert scorer.score(items("later"), 60) == [1.0]
    out, text = capfd.readouterr()
    assert "seen good \\x1b[2J\nseen bad" in text and "seen later" in text and not out
    assert len(text) < SHOWN_BYTES + 300 and "more bytes of what the reward printed" in text


@pytest.mark.parametrize("name", ["takes_much", "starts_one_that_takes_much"])
def test_a_sample_that_takes_too_much_memory_costs_itself_alone(name, monkeypatch):
    monkeypatch.setattr(scorer_module, "LOOK_SECONDS", 0.05)
    with Scorer(f"{FILE}:{name}", seconds_per_call=60, memory_gib=0.25) as scorer:
        first, bad, last = scorer.score(items("good", "bad", "good"), 60)
    assert first == last == 1.0
    assert isinstance(bad, Failure) and bad.kind == "error" and "than 0.25 GiB" in bad.text


def test_a_reward_that_keeps_memory_costs_no_sample(monkeypatch):
    monkeypatch.setattr(scorer_module, "LOOK_SECONDS", 0.05)
    with Scorer(f"{FILE}:keeps", seconds_per_call=60, memory_gib=0.25) as scorer:
        assert [scorer.score(items("a"), 60) for _ in range(5)] == [[1.0]] * 5
    with Scorer("exact_match", memory_gib=1e-3) as scorer, pytest.raises(ValueError, match="large"):
        scorer.wait_until_ready()


def test_a_scoring_process_goes_before_one_that_trains_when_memory_runs_out():
    with Scorer("exact_match") as scorer:
        scorer.wait_until_ready()
        pid = scorer._process._process.pid
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


@pytest.mark.slow
def test_a_call_that_hangs_does_not_outlive_the_worker():
    program = (
        "import sys, threading, time\nfrom hybridflow.rewards import RewardItem, Scorer\n"
        "scorer = Scorer(sys.argv[1], seconds_per_call=0.5)\nscorer.wait_until_ready()\n"
        "items = [RewardItem('', 'bad', '', {})]\n"
        "threading.Thread(target=scorer.score, args=(items, 60), daemon=True).start()\n"
        "time.sleep(0.3)\nprint(scorer._process._process.pid, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    command = [sys.executable, "-c", program, f"{FILE}:holds_the_interpreter"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{int(done.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_the_process_ends_with_the_one_that_started_it(tmp_path):
    program = (
        "import os\nfrom hybridflow.rewards import Scorer\n"
        "scorer = Scorer('exact_match')\nscorer.wait_until_ready()\n"
        "print(scorer._process._process.pid, flush=True)\nos._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    deadline = time.monotonic() + 60
    while Path(f"/proc/{int(done.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{int(done.stdout)}").exists()
