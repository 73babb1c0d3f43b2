"""Runs a problem on a backend and holds its results against the reference.

The bounds are those of the tests: helpers/compare.py, of each element.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from cuflash.backends.emulator import runtime
from cuflash.launch import recipe
from helpers import calls, expected, kvcache_calls, tried
from helpers.backends import CupyBackend, EmulatedBackend
from helpers.checks import (
    check_double_backward,
    check_forward,
    check_jvp,
    check_packed,
)
from helpers.compare import assert_gradients_match, assert_matches
from helpers.data import Case, inputs, lse_gradient
from helpers.derivatives import tangents
from helpers.kvcache_calls import KVCase
from helpers.softmax_states import merged, states

from .programs import Program

# Directions of programs whose plans have other names.
PLANNED = {"packed": "forward", "forward_kvcache": "kvcache"}


class OnEmulator(EmulatedBackend):
    """The emulator; programs are looked up once."""

    def __init__(self) -> None:
        # Keys of the cache hold the whole text, which takes milliseconds.
        self.executable = functools.lru_cache(256)(runtime.executable)

    @contextlib.contextmanager
    def running(self, case: Any) -> Iterator[None]:
        with (
            super().running(case),
            mock.patch.object(runtime, "executable", self.executable),
        ):
            yield


class OnGPU(CupyBackend):
    """This machine's GPU, with the family that a case asks for."""

    def __init__(self) -> None:
        from cuflash.backends import cupy as gpu

        self.target = gpu.backend(0)

    @contextlib.contextmanager
    def running(self, case: Any) -> Iterator[None]:
        noting = tried.noting(recipe.plan)
        with (
            mock.patch.object(self.target, "family", case.on.family),
            mock.patch.object(recipe, "plan", noting),
        ):
            yield


def family(program: Program) -> str:
    """Return the family of the last call of a program."""
    return tried.family(PLANNED.get(program.direction, program.direction))


def check(backend: Any, program: Program, problem: Case | KVCase) -> None:
    """Run one problem; AssertionError if an element is beyond its bound."""
    CHECKS[program.direction](backend, program, problem)


def _forward(backend: Any, program: Program, case: Case) -> None:
    check_forward(backend, case)


def _backward(backend: Any, program: Program, case: Case) -> None:
    q, k, v, dout = inputs(case)
    dlse, more = None, {}
    if program.dlse:
        dlse = lse_gradient(case)
        more["dlse"] = backend.place(dlse)
    if program.of_forward:
        out, lse = calls.forward(backend, case, q, k, v)
    else:
        out, lse = calls.states(case, q, k, v)
    got = calls.backward(backend, case, dout, q, k, v, out, lse, **more)
    want = expected.backward(
        dout, q, k, v, dlse=dlse, sums=case.sums(), **case.meaning()
    )
    assert_gradients_match(got, want, case)


def _packed(backend: Any, program: Program, case: Case) -> None:
    check_packed(backend, case)


def _kvcache(backend: Any, program: Program, case: KVCase) -> None:
    kvcache_calls.check(backend, case)


def _jvp(backend: Any, program: Program, case: Case) -> None:
    check_jvp(backend, case, tangents(case, program.moving))


def _double_backward(backend: Any, program: Program, case: Case) -> None:
    check_double_backward(backend, case, tangents(case, program.moving))


def _merge(backend: Any, program: Program, case: Case) -> None:
    given = states(replace(case, seqlen_k=0), 1 + case.seed % 5)
    got = calls.merge_states(backend, case, *given)
    for name, x, want in zip(("out", "lse"), got, merged(*given), strict=True):
        assert_matches(x, want, name, case)


CHECKS = {
    "forward": _forward,
    "backward": _backward,
    "packed": _packed,
    "forward_kvcache": _kvcache,
    "jvp": _jvp,
    "double_backward": _double_backward,
    "merge": _merge,
}
