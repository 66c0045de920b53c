"""A question that nobody answers holds nobody up."""

from __future__ import annotations

import threading
import time

import pytest

from vsrtune.host.libvirt import Patience


def test_answers_and_errors_come_back() -> None:
    patience = Patience(10)
    assert patience.ask(lambda: 7) == 7

    def broken() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        patience.ask(broken)
    assert patience.ask(lambda: 8) == 8


def test_one_question_waits_at_most() -> None:
    patience = Patience(0.05)
    end, asked = threading.Event(), []

    def silent() -> int:
        asked.append(1)
        end.wait()
        return 1

    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        patience.ask(silent)
    begin = time.monotonic()
    for _ in range(100):
        with pytest.raises(TimeoutError, match="an earlier question"):
            patience.ask(silent)
    assert time.monotonic() - begin < 1
    assert len(asked) == 1
    end.set()
    while patience.silent:
        time.sleep(0.01)
    assert patience.ask(lambda: 2) == 2
