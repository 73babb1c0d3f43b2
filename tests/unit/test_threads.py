"""Calls of eight threads, equal and different ones, have their results.

Nothing is remembered when they start, so they meet wherever something is
decided once. Each check is tried on a planted fault, too. On a Python without
the GIL the threads run at once; with it they take turns as often as they can.
"""

import contextlib
import struct
import threading
import time
import weakref
import zlib
from collections import deque

import numpy as np
import pytest

import cuflash
from cuflash import emulator
from cuflash.expressions import nodes
from cuflash.launch.runner import Kernels
from cuflash.launch.template import Template
from cuflash.request.kept import Kept
from helpers import cpu_calls, fake_cupy
from helpers.checked_by import check
from helpers.compare import assert_bitwise
from helpers.counting import Counting
from helpers.host_compiler import needs_compiler
from helpers.threads import at_once, forget

rng = np.random.default_rng(0)
X = cpu_calls.arrays()
TABLE = rng.standard_normal(599)
IDS = np.repeat(np.arange(3, dtype=np.int32), 100)[None].repeat(2, axis=0)


def relative(score, b, h, q_idx, kv_idx, *, table):
    return score + table[q_idx - kv_idx + 299]


SCORE = {"score_mod": relative, "mod_arrays": {"table": TABLE}}


OPTIONS = (
    {},
    {"causal": True},
    {"window": (20, 3), "softcap": 5.0},
    {"segment_ids_q": IDS, "segment_ids_k": IDS},
    SCORE,
    {"mask_mod": lambda b, h, i, j: (i // 7 + j) % 3 > 0},
)


def assert_same(got, want):
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(np.asarray(one), np.asarray(other), f"result {i}")


# On NumPy arrays -------------------------------------------------------------

ON_NUMPY = [
    *(("forward", options) for options in OPTIONS),
    ("backward", {"causal": True}),
    ("backward", SCORE),
    ("jvp", {}),
    ("double_backward", {"softcap": 5.0}),
]


def test_calls_on_numpy():
    def call(i):
        name, options = ON_NUMPY[i % len(ON_NUMPY)]
        return cpu_calls.call(name, X, **options)

    want = [*map(call, range(len(ON_NUMPY)))]
    forget()
    # Threads 2n and 2n + 1 make the same calls at the same time.
    found = at_once(
        lambda i: [call(i // 2 + step) for step in range(len(ON_NUMPY))]
    )
    for i, calls in enumerate(found):
        for step, got in enumerate(calls):
            assert_same(got, want[(i // 2 + step) % len(ON_NUMPY)])


# Recipes and structs, on a driver that notes launches ------------------------


class Noting(Counting):
    """Notes what it launches; its addresses are numbers by order."""

    def __init__(self, target):
        super().__init__(target.arch)
        self.target, self.log, self.known = target, [], []

    def address(self, arrays, written=False):
        return [0 if x is None else self._number(x) for x in arrays]

    def _number(self, array):
        self.known.append(array)
        first = next(i for i, x in enumerate(self.known) if x is array)
        return 4096 * (first + 1)

    @staticmethod
    def tensor_map(address, boxes):
        return zlib.crc32(repr((address, boxes)).encode()).to_bytes(128, "big")

    def launch(self, loaded, arguments, kind):
        kernels = [(x.kernel.file, x.kernel.constants) for x in loaded]
        self.log.append((repr(kernels), arguments))


Q, K, V = (X[x].astype(np.float16) for x in "qkv")
OUT, LSE = cuflash.forward(Q, K, V, return_lse=True)
GIVEN = {"q": Q, "k": K, "v": V}
LAUNCHED = [
    *(("forward", GIVEN | options) for options in OPTIONS[:4]),
    ("backward", {"dout": OUT, **GIVEN, "out": OUT, "lse": LSE}),
    ("jvp", {**GIVEN, "q_dot": Q, "k_dot": K, "v_dot": V}),
    ("merge_states", {"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE}),
]


def launched_alike():
    """Compare what threads launch with what one launches alone."""
    target = Counting("sm_90a")

    def call(i):
        name, given = LAUNCHED[i % len(LAUNCHED)]
        machine = Noting(target)
        getattr(Kernels(machine), name)(check(name, **given))
        return machine.log

    want = [*map(call, range(len(LAUNCHED)))]
    assert all(want)
    forget()
    found = at_once(
        lambda i: [call(i // 2 + step) for step in range(len(LAUNCHED))]
    )
    for i, calls in enumerate(found):
        for step, got in enumerate(calls):
            assert got == want[(i // 2 + step) % len(LAUNCHED)]


def test_launches():
    launched_alike()


def test_a_struct_that_threads_share_is_found(monkeypatch):
    """Planted: addresses are written into one buffer."""
    known, shared = Template.fill, {}

    def fill(self, maps, pointers):
        shared["buffer"] = own = [*maps], pointers
        ends = time.monotonic() + 0.2
        while shared["buffer"] is own and time.monotonic() < ends:
            if threading.current_thread() is threading.main_thread():
                break
            time.sleep(0.001)
        return known(self, *shared["buffer"])

    monkeypatch.setattr(Template, "fill", fill)
    with pytest.raises((AssertionError, struct.error)):
        launched_alike()


# What is made once -----------------------------------------------------------


def recorded(i):
    """A graph that no other test has made."""
    node = nodes.constant(2.0**-77)
    for _ in range(50):
        node = nodes.make("add", "real", (node, nodes.SCORE))
    return node


def test_equal_nodes_are_one():
    assert len({*map(id, at_once(recorded))}) == 1


def test_two_nodes_for_one_are_found(monkeypatch):
    """Planted: nobody waits between looking for a node and storing it."""

    class Slow(weakref.WeakValueDictionary):
        def get(self, key, default=None):
            found = super().get(key, default)
            time.sleep(0.0001)
            return found

    monkeypatch.setattr(nodes, "_KNOWN", Slow())
    monkeypatch.setattr(nodes, "_LOCK", contextlib.nullcontext())
    assert len({*map(id, at_once(recorded))}) > 1


def test_flags_kept_by_several_are_the_first_ones():
    kept = Kept()
    for key in range(20):
        found = at_once(lambda i: kept.put(key, [i]))  # noqa: B023
        assert len({*map(id, found)}) == 1
    assert len(kept) == Kept.MOST


def test_a_device_has_one_backend(monkeypatch):
    _, backend = fake_cupy.in_place(monkeypatch)
    init = backend.CupyBackend.__init__

    def slow(self, index):
        time.sleep(0.01)
        init(self, index)

    monkeypatch.setattr(backend.CupyBackend, "__init__", slow)
    assert len({*map(id, at_once(lambda i: backend.backend(0)))}) == 1


class Event:
    """Of a kernel; another thread has time to ask, too."""

    def __init__(self, done):
        self._done = done

    @property
    def done(self):
        done = self._done
        time.sleep(0.05)
        return done


@pytest.mark.parametrize("locked", [True, False])
def test_memory_in_use_is_held(monkeypatch, locked):
    """Without the lock a second thread lets go what it did not look at."""
    _, backend = fake_cupy.in_place(monkeypatch)
    if not locked:
        monkeypatch.setattr(backend, "_lock", contextlib.nullcontext())
    in_use = Event(False), [Q]
    monkeypatch.setattr(backend, "_held", deque([(Event(True), [K]), in_use]))
    at_once(lambda i: backend._let_go(), 2)
    assert [*backend._held] == ([in_use] if locked else [])


# On the emulator: one compilation, a process a launch ------------------------


@needs_compiler
def test_emulated_calls():
    few = {name: x[:, :20] for name, x in X.items()}

    def call(seed):
        with emulator.active("sm_80", seed=seed % 2):
            return cpu_calls.call("forward", few, causal=seed % 4 < 2)

    want = [*map(call, range(4))]
    forget()
    for i, got in enumerate(at_once(call)):
        assert_same(got, want[i % 4])
