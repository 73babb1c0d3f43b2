"""Runs the problems of one seed, in this process.

A unit is a seed: a program and its problems. On a GPU one in LARGE_EVERY is a
large call instead (shapes.py), which is compared on the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cuflash.plans.plan import plan, wanted_family

from . import problems, programs

# For the emulator, a unit's five to ten kernels take two to five seconds of a
# core to compile, a problem 50 ms; on a GPU a kernel takes seconds, and a
# problem's reference 20 ms.
PROBLEMS = {"emulator": 96, "gpu": 24}
LARGE_EVERY = 8
MOST_WRONG = 3  # of one unit; the others are most likely the same fault


class Done(NamedTuple):
    """One problem.

    name : of its seed and number, for --again.
    labels : what it counts as.
    wrong : what is wrong; empty if nothing is.
    broken : whether this process can run nothing more.
    """

    name: str
    labels: dict[str, Any]
    wrong: str = ""
    broken: bool = False


def run(
    on: str,
    backend: Any,
    seed: int,
    only: int | None = None,
    starts: Callable[[int], None] = lambda index: None,
) -> Iterator[Done]:
    """Run the problems of a seed, or one; yield each when it is done.

    starts : told the number of each problem before it runs.
    """
    if is_large(on, seed):
        starts(0)
        yield _large(seed)
        return
    program, wrong = programs.draw(seed, on == "gpu"), 0
    for index in range(PROBLEMS[on]) if only is None else [only]:
        starts(index)
        done = _problem(on, backend, program, index)
        yield done
        wrong += bool(done.wrong)
        if done.broken or wrong == MOST_WRONG:
            return


def is_large(on: str, seed: int) -> bool:
    """Whether a seed is one large call."""
    return on == "gpu" and seed % LARGE_EVERY == 0


def _problem(
    on: str, backend: Any, program: programs.Program, index: int
) -> Done:
    from helpers import tried

    from .checking import check, family

    problem = problems.draw(program, index, on)
    labels = problems.labels(program, problem)
    tried.PLANNED.clear()
    wrong, broken = "", False
    try:
        check(backend, program, problem)
    except Exception as error:
        wrong, broken = said(error), is_broken(error)
        if repr(problem) not in wrong:
            wrong += f" ({problem!r})"
    labels["family"] = family(program)
    return Done(f"{program.seed}/{index}", labels, wrong, broken)


def _large(seed: int) -> Done:
    from cuflash.backends import cupy as gpu

    from .large import WrongResult, check
    from .shapes import draw

    shape, wrong, broken = draw(seed), "", False
    problem = shape.problem("backward")
    labels = {
        "direction": "large",
        "dtype": shape.dtype,
        "options": ["causal"] * shape.causal
        + ["deterministic"] * shape.deterministic,
        "values": "normal",
        "layout": "contiguous",
        "precision": shape.precision,
        "family": plan(problem, gpu.device(0), wanted_family()).family,
    }
    try:
        check(shape)
    except WrongResult as error:
        wrong = f"{error} ({shape})"
    except Exception as error:
        wrong, broken = f"{said(error)} ({shape})", is_broken(error)
    if not broken:  # a process keeps its memory, and there are many
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
    return Done(f"{seed}/0", labels, wrong, broken)


def said(error: Exception) -> str:
    """Describe an error in one line."""
    text = re.sub(r"\s*\n\s*", " ", str(error))
    return f"{type(error).__name__}: {text}"


def is_broken(error: Exception) -> bool:
    """Whether a GPU's error stays: each later call raises it too."""
    return type(error).__name__ in ("CUDARuntimeError", "CUDADriverError")
