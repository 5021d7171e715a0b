"""Signals end a run once; those that come during the clean-up are not heeded."""

import os
import signal

import pytest

from hybridflow.dataflow.signals import ENDING, Terminated, orderly_end


@pytest.mark.parametrize("number", ENDING)
def test_the_first_raises_and_the_clean_up_is_left_alone(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in ENDING]
    cleaned = False
    with pytest.raises(KeyboardInterrupt) as caught, orderly_end() as begin:
        try:
            os.kill(os.getpid(), number)
        finally:
            begin()
            for each in ENDING:
                os.kill(os.getpid(), each)
            cleaned = True
    assert cleaned
    assert isinstance(caught.value, Terminated) == (number != signal.SIGINT)
    assert str(caught.value) == ("" if number == signal.SIGINT else number.name)
    assert [signal.getsignal(each) for each in ENDING] == before


def test_a_signal_that_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with orderly_end():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
