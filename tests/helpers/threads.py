"""Threads that do something at the same moment, from cold caches."""

import functools
import gc
import sys
import threading
from contextlib import contextmanager

COUNT = 8


@contextmanager
def _hurried():
    """Let threads take turns as often as they can, where there is a GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(work, count=COUNT):
    """Return work(i) of `count` threads, in order; raise the first error."""
    results, errors = [None] * count, []
    barrier = threading.Barrier(count)

    def run(i):
        try:
            barrier.wait(timeout=60)
            results[i] = work(i)
        except BaseException as error:  # for the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    with _hurried():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


def forget():
    """Empty all that cuflash's functions remember."""
    gc.unfreeze()  # conftest.py froze what it imported, which is not listed
    for found in gc.get_objects():
        # No isinstance: some objects of libraries warn of being asked.
        if type(found) is functools._lru_cache_wrapper:
            if (found.__module__ or "").startswith("cuflash."):
                found.cache_clear()
