"""The cases with which bridges are tested: each option, each dtype.

PyTorch's and JAX's tests share them, and so the kernels' programs.
"""

from itertools import cycle

import numpy as np
import pytest

import cuflash
from helpers.data import Case, inputs, lse_gradient
from helpers.dtypes import DTYPES
from helpers.option_cases import sizes
from helpers.options import TABLE, everything, fields_of

# So many keys that each bound in the table masks some.
SIZES = sizes(2, 20, 70, 4, 2, 16, 16)
PACKED = {"batch": 1, "offsets": ((0, 3, 20), (0, 40, 70))}


def _cases():
    """Each option with one of the dtypes, and each dtype with all."""
    dtypes = cycle(DTYPES)
    for data in TABLE.values():
        for name, fields in [*data.alone.items()][:1]:
            fields = SIZES | fields | (PACKED if "offsets" in fields else {})
            yield name, Case(next(dtypes), **fields)
    for dtype in DTYPES:
        fields = SIZES | fields_of(everything())
        yield f"all-{dtype}", Case(dtype, **fields)
    fields = sizes(1, 20, 40, 2, 1, 16, 16, causal=True)
    yield "tf32x3", Case(**fields, precision="tf32x3")


CASES = dict(_cases())
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def arch_of(dtype):
    """The architecture on which a dtype's kernels are emulated."""
    return "sm_90a" if dtype == "bfloat16" else "sm_80"


DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


class BridgeCase:
    """A case's call, and what NumPy's calls make of it.

    arrays : by name: q, k, v and the options.
    numbers : the other arguments.
    wrt : the names of those that have gradients.
    douts : the gradients of out and of lse.
    moved : tangents of the arrays `wrt`.
    """

    def __init__(self, case):
        given = {n: x for n, x in case.call().items() if x is not None}
        self.numbers = {
            n: x for n, x in given.items() if not isinstance(x, np.ndarray)
        }
        others = {n: x for n, x in given.items() if n not in self.numbers}
        *qkv, dout = inputs(case)
        dlse = lse_gradient(case)
        if case.offsets is not None:  # packed sequences have no batch
            *qkv, dout, dlse = (x[0] for x in (*qkv, dout, dlse))
        self.arrays = dict(zip("qkv", qkv, strict=True)) | others
        self.wrt = [x for x in DIFFERENTIABLE if x in self.arrays]
        self.douts = dout, dlse
        rng = np.random.default_rng([case.seed, 1])
        self.moved = {
            name: rng.standard_normal(x.shape).astype(x.dtype)
            for name, x in self.arrays.items()
            if name in self.wrt
        }

    def results(self):
        """out and lse."""
        return cuflash.forward(**self.arrays, **self.numbers, return_lse=True)

    def gradients(self, out, lse):
        """Of the arrays `wrt`."""
        dout, dlse = self.douts
        return cuflash.backward(
            out=out, lse=lse, dout=dout, dlse=dlse, **self.arrays,
            **self.numbers, **self._wanted("return_d"),
        )  # fmt: skip

    def tangents(self):
        """Of out and lse."""
        moved = {f"{name}_dot": x for name, x in self.moved.items()}
        return cuflash.jvp(
            **self.arrays, **self.numbers, **moved, return_lse=True
        )[2:]

    def second_gradients(self, out, lse):
        """Of the arrays `wrt`, dout and dlse: of what they are moved by."""
        dout, dlse = self.douts
        moved = {f"dd{name}": x for name, x in self.moved.items()}
        q, k, v, ddout, *others, ddlse = cuflash.double_backward(
            out=out, lse=lse, dout=dout, dlse=dlse, return_ddlse=True,
            **self.arrays, **self.numbers, **moved,
            **self._wanted("return_d2"),
        )  # fmt: skip
        return q, k, v, *others, ddout, ddlse

    def _wanted(self, prefix):
        return {f"{prefix}{name}": True for name in self.wrt[3:]}
