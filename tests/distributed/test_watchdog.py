"""The watchdog ends exchanges that take too long, and no others."""

import threading
import time

import pytest

from cuflash.distributed.watchdog import Watchdog


class Event:
    def __init__(self, done=False):
        self.done = done


@pytest.fixture
def aborted():
    return threading.Event()


@pytest.fixture
def watchdog(aborted):
    watchdog = Watchdog(0.1, aborted.set)
    yield watchdog
    watchdog.close()


def test_an_exchange_that_does_not_end(watchdog, aborted):
    watchdog.queued(watchdog.begin(), Event(done=True), Event())
    assert aborted.wait(5) and watchdog.expired


def test_the_host_waits_for_a_connection(watchdog, aborted):
    watchdog.begin()
    assert aborted.wait(5)


def test_an_exchange_that_has_not_started(watchdog, aborted):
    """It waits for what is queued before it."""
    watchdog.queued(watchdog.begin(), Event(), Event())
    assert not aborted.wait(0.4)


def test_exchanges_that_end(watchdog, aborted):
    for _ in range(4):
        watchdog.queued(watchdog.begin(), Event(done=True), Event(done=True))
        time.sleep(0.05)
    assert not aborted.wait(0.3)


def test_time_counts_from_the_start(watchdog, aborted):
    start, end = Event(), Event()
    watchdog.queued(watchdog.begin(), start, end)
    assert not aborted.wait(0.3)
    start.done = True
    assert aborted.wait(5)


def test_what_comes_after_one_that_ended(watchdog, aborted):
    watchdog.queued(watchdog.begin(), Event(done=True), Event(done=True))
    watchdog.queued(watchdog.begin(), Event(done=True), Event())
    assert aborted.wait(5)


def test_what_could_not_be_queued(watchdog, aborted):
    watchdog.dismiss(watchdog.begin())
    assert not aborted.wait(0.3)
