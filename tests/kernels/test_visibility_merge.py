"""Which states a merge adds up: each set of those that saw keys.

By the probes of helpers/visibility.py. State i is of i + 1 keys with the same
code; row r has seen those whose bit is set in r. Or lse is so far apart that
the last state counts as a key, and those before it as none.
"""

import numpy as np
import pytest

from cuflash import emulator
from cuflash.distributed.machine import Device, Host
from cuflash.launch.partial import MOST_OTHERS
from helpers import calls
from helpers import visibility as probe
from helpers.backends import EMULATED, on_backends
from helpers.data import Case
from helpers.dtypes import DTYPES, lse_dtype

HEADS = 2
OTHER = np.nan  # what a state holds that saw nothing
APART = 200.0  # exp(-APART) is 0 beside 1

on_distances = pytest.mark.parametrize("apart", [0, APART])

on_dtypes = pytest.mark.parametrize("dtype", DTYPES)


class States:
    """States (out, lse) of rows that have seen different ones of them.

    weights : (rows, count), how many keys each counts as.
    raised : what is added to the logarithm of their sum.
    """

    def __init__(self, dtype, count, apart):
        seen = np.arange(2**count)[:, None] >> np.arange(count) & 1
        last = seen * (np.cumsum(seen[:, ::-1], 1)[:, ::-1] == 1)
        self.weights = last if apart else seen * np.arange(1, count + 1)
        keys = 1 if apart else np.arange(1, count + 1)
        self.raised = apart * (last @ np.arange(count))
        self.code = probe.codes("v", 1, count, HEADS)
        with np.errstate(divide="ignore"):
            lses = np.log(seen * keys) + apart * np.arange(count)
        self.given = []
        for i in range(count):
            out = np.where(seen[:, i, None, None], self.code[0, i], OTHER)
            lse = np.tile(lses[:, i], (1, HEADS, 1)).astype(lse_dtype(dtype))
            self.given.append((out[None].astype(dtype), lse))

    def check(self, out, lse):
        """Assert that out and lse are those of the keys of each state."""
        lse = np.asarray(lse, np.float64) - self.raised
        probe.assert_states(out, lse, self.weights, out, self.code)


@on_backends
@on_dtypes
@on_distances
@pytest.mark.parametrize("count", [2, 5])
def test_merge_states(backend, dtype, apart, count):
    states = States(DTYPES[dtype], count, apart)
    flat = [x for state in states.given for x in state]
    states.check(*calls.merge_states(backend, Case(dtype), *flat))


@pytest.mark.parametrize("backend", [EMULATED])
@on_dtypes
@on_distances
@pytest.mark.parametrize("count", range(1, MOST_OTHERS + 1))
@pytest.mark.parametrize("kind", [Device, Host])
def test_merge_of_ranks(backend, kind, dtype, apart, count):
    """As ranks merge what they computed with each other's keys."""
    states = States(DTYPES[dtype], 1 + count, apart)
    (own, lse), *others = states.given
    to = np.zeros_like(own)
    with emulator.active("sm_80"):
        machine = Device(own) if kind is Device else Host()
        machine.merge(own, lse, others, to)
    states.check(to, lse)
