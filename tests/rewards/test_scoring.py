"""Scoring a batch: order, errors that name the sample, and functions that hang."""

import subprocess
import sys
import textwrap
import threading

import pytest

from hybridflow.rewards import RewardError, RewardItem, RewardTimeout, resolve, score_batch


def items(*responses: str) -> list[RewardItem]:
    return [RewardItem("2+2=", response, "4", {"answer": "4"}) for response in responses]


def test_rewards_come_in_the_order_of_the_items():
    rewards = score_batch(resolve("exact_match"), items("4", "5", "4"), 60)
    assert rewards == [1.0, 0.0, 1.0]
    assert score_batch(resolve("exact_match"), [], 60) == []


@pytest.mark.parametrize(("value", "reward"), [(True, 1.0), (3, 3.0), (-0.5, -0.5)])
def test_bool_and_int_count_as_numbers(value, reward):
    (result,) = score_batch(lambda *_: value, items("4"), 60)
    assert result == reward and type(result) is float


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0]])
def test_anything_else_names_function_and_sample(value):
    def odd(prompt, response, answer, row):
        return value if response == "bad" else 1.0

    with pytest.raises(RewardError, match=r"'odd' returned .*finite.*sample 1 .*'bad'"):
        score_batch(odd, items("4", "bad"), 60)


def test_an_exception_names_function_and_sample_and_is_the_cause():
    def strict(prompt, response, answer, row):
        return float(row["missing"])

    with pytest.raises(RewardError, match=r"'strict' raised KeyError.*\n.*sample 0") as caught:
        score_batch(strict, items("x" * 1000), 60)
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(str(caught.value)) < 600


def test_a_timeout_error_of_the_function_is_no_missed_deadline():
    def remote(prompt, response, answer, row):
        raise TimeoutError("the judge does not answer")

    with pytest.raises(RewardError, match="the judge does not answer") as caught:
        score_batch(remote, items("4"), 60)
    assert not isinstance(caught.value, RewardTimeout)


def test_a_function_that_hangs_ends_as_an_error_that_shows_where():
    release = threading.Event()

    def hangs(prompt, response, answer, row):
        if response == "slow":
            release.wait(60)
        return 1.0

    try:
        with pytest.raises(RewardTimeout, match=r"(?s)'hangs'.*1 are done.*sample 1 .*wait"):
            score_batch(hangs, items("4", "slow", "4"), 0.5)
    finally:
        release.set()


def test_a_process_of_its_own_ends_even_when_no_thread_can_run():
    """A backtracking expression holds the interpreter: only the process's end helps."""
    program = """
        import hybridflow.rewards.scoring as scoring
        from hybridflow.rewards import RewardItem, resolve, score_batch

        scoring._GRACE_SECONDS = 0.5
        fn = resolve("format_regex", {"pattern": "(a|aa)+b"})
        score_batch(fn, [RewardItem("p", "a" * 200, "", {})], 0.5, own_process=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "format_regex" in done.stderr and "Timeout" in done.stderr
