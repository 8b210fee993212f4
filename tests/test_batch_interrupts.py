"""An interrupt that Python loses is raised again; one that was heard is not."""

import os
import signal
import time

import pytest

from perfbook.batch import interrupts
from perfbook.batch.interrupts import interruptible, undisturbed


def raised_within(seconds: float) -> bool:
    """Whether KeyboardInterrupt arrives while this sleeps."""
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lost_interrupt_comes_again(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_INSIST_S", 0.05)
    before = signal.getsignal(number)
    with interruptible() as heard:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(5)
        assert raised_within(5)  # nobody acknowledged it
        heard.acknowledge()
        assert not raised_within(0.2)
        os.kill(os.getpid(), number)  # a second Ctrl-C while the first is being dealt with
        assert not raised_within(0.1)
    assert signal.getsignal(number) is before


def test_undisturbed_while_stopping() -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests in the background
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        assert not raised_within(0.1)
    assert signal.getsignal(signal.SIGINT) is before
