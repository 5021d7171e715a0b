"""Rewards that do what rewards should not, on the response "bad" alone."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time


def hangs(prompt, response, answer, row):
    if response == "bad":
        time.sleep(1000)
    return 1.0


def holds_the_interpreter(prompt, response, answer, row):
    if response == "bad":
        ctypes.PyDLL(None).sleep(1000)  # without letting another thread run
    return 1.0


def hears_no_signal(prompt, response, answer, row):
    if response == "bad":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(1000)
    return 1.0


def notes_and_leaves(prompt, response, answer, row):
    with open(row["notes"], "a", encoding="utf-8") as notes:
        notes.write(f"{response}\n")
    if response == "bad":
        os._exit(3)
    return 1.0


def forks(prompt, response, answer, row):
    if response == "bad":
        os.fork()
    return 1.0


def forks_and_hangs(prompt, response, answer, row):
    if response == "bad" and os.fork() == 0:
        time.sleep(1000)
    return 1.0


def starts_a_session(prompt, response, answer, row):
    if response == "bad":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return 1.0


def exits(prompt, response, answer, row):
    if response == "bad":
        sys.exit(3)
    return 1.0


def leaves(prompt, response, answer, row):
    if response == "bad":
        os._exit(3)
    return 1.0


def kills_itself(prompt, response, answer, row):
    if response == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def raises(prompt, response, answer, row):
    if response == "bad":
        raise KeyError("units")
    return 1.0


class _Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises_without_text(prompt, response, answer, row):
    if response == "bad":
        raise _Unspeakable
    return 1.0


def says_much(prompt, response, answer, row):
    if response == "bad":
        raise ValueError("x" * 10_000_000)
    return 1.0


async def waits(prompt, response, answer, row):
    await asyncio.sleep(1000 if response == "bad" else 0)
    return 1.0


async def will_not_be_cancelled(prompt, response, answer, row):
    while response == "bad":
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue
    return 1.0


async def cancels_itself(prompt, response, answer, row):
    if response == "bad":
        raise asyncio.CancelledError
    return 1.0


async def exits_later(prompt, response, answer, row):
    await asyncio.sleep(0)
    if response == "bad":
        sys.exit(3)
    return 1.0


async def blocks_the_others(prompt, response, answer, row):
    await asyncio.sleep(0.01)
    if response == "bad":
        time.sleep(1000)
    await asyncio.sleep(0.01)
    return 1.0


def returns(prompt, response, answer, row, *, value):
    made = {"object": object(), "nan": float("nan"), "infinite": float("inf"), "huge": 10**400}
    if isinstance(value, str):
        value = made.get(value, value)
    return value if response in ("bad", ["b", "a", "d"]) else 1.0


def writes_nonsense(prompt, response, answer, row):
    if response == "bad":
        for number in range(3, 20):
            try:
                os.write(number, b"\0" * 7 + b"\5hello")
            except OSError:
                continue
    return 1.0


def speaks_out_of_turn(prompt, response, answer, row):
    for number in range(3, 20) if response == "bad" else ():
        for body in (b'["done", 0, 1.0]', b'["error", 99, "no"]'):
            try:
                os.write(number, len(body).to_bytes(8, "big") + body)
            except OSError:
                continue
    return 1.0


_KEPT = []


def keeps(prompt, response, answer, row):
    _KEPT.append(b"x" * (70 << 20))
    time.sleep(0.3)  # so that it is looked at
    return 1.0


def takes_much(prompt, response, answer, row):
    if response == "bad":
        _KEPT.append(b"x" * (400 << 20))
        time.sleep(1000)
    return 1.0


def starts_one_that_takes_much(prompt, response, answer, row):
    if response == "bad":
        program = "import time; kept = b'x' * (400 << 20); time.sleep(1000)"
        subprocess.run([sys.executable, "-c", program], check=True)
    return 1.0


def prints(prompt, response, answer, row):
    print("seen", response, "\x1b[2J", flush=True)
    if response == "bad":
        os.write(1, b"x" * (3 << 20))
        os.write(2, b"warned\n")
    return 1.0


def slow(prompt, response, answer, row):
    time.sleep(0.3)
    return 1.0


def writes_into_its_row(prompt, response, answer, row):
    row["n"] = row.get("n", 0) + 1
    row["list"].append(1)
    return float(row["n"] + len(row["list"]))


def raises_controls(prompt, response, answer, row):
    if response == "bad":
        raise ValueError("clear \x1b[2J, half \ud800, ünï")
    return 1.0


class Batches:
    """Scores two at a time; a batch with "bad" fails as told."""

    batch = 2

    def __init__(self, how="count"):
        self.how = how

    def score(self, items):
        if all(item.response != "bad" for item in items):
            return [1.0] * len(items)
        if self.how == "one":
            return [OSError("no answer") if item.response == "bad" else 1.0 for item in items]
        if self.how == "raise":
            raise RuntimeError("out of memory")
        return {"count": [1.0], "none": None, "text": "11"}[self.how]


class NeverMade:
    def __init__(self, how="raise"):
        if how == "hang":
            time.sleep(1000)
        if how == "leave":
            os._exit(4)
        raise RuntimeError("no weights")
