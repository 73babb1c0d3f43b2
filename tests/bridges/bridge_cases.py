"""The cases with which bridges are tested: each option, each dtype.

PyTorch's and JAX's tests share them, and so the kernels' programs.
"""

from itertools import cycle

import pytest

from helpers.data import Case
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
    yield "tf32x3", Case(**{**SIZES, "causal": True}, precision="tf32x3")


CASES = dict(_cases())
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def arch_of(dtype):
    """The architecture on which a dtype's kernels are emulated."""
    return "sm_90a" if dtype == "bfloat16" else "sm_80"
