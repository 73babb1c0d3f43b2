"""Compiles several kernels at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from cuflash.errors import CuflashError
from cuflash.plans.plan import KernelPlan


def in_threads(
    work: Callable[[KernelPlan, str], Any],
    tasks: Iterable[tuple[KernelPlan, str]],
    jobs: int,
) -> Iterator[tuple[KernelPlan, str, Any]]:
    """Run work(kernel, arch) for all tasks; yield results as they complete.

    A CuflashError is yielded as a result.
    """
    pool = ThreadPoolExecutor(max_workers=max(jobs, 1))
    try:
        tasks_of = {pool.submit(work, *task): task for task in tasks}
        for done in as_completed(tasks_of):
            error = done.exception()
            if error and not isinstance(error, CuflashError):
                raise error
            yield *tasks_of[done], error or done.result()
    finally:  # after Ctrl-C too: do not wait
        pool.shutdown(wait=False, cancel_futures=True)
