"""The four dtypes, and the numbers from which tolerances are derived."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


class Precision(NamedTuple):
    """The precision to expect of a dtype's results.

    unit : largest relative error of one rounding to the dtype, 2^-p.
    floor : largest absolute error of one rounding of a number too small
        for `unit` to hold: half the smallest subnormal, but not less than
        the smallest normal of the arithmetic, which is flushed to zero.
    sum_unit : error of one addition relative to its result. Twice the
        rounding of the arithmetic (float32, or float64 for float64), as
        tensor cores may truncate.
    """

    unit: float
    floor: float
    sum_unit: float


PRECISION = {
    "float16": Precision(2.0**-11, 2.0**-25, 2.0**-23),
    "bfloat16": Precision(2.0**-8, 2.0**-126, 2.0**-23),
    "float32": Precision(2.0**-24, 2.0**-126, 2.0**-23),
    "float64": Precision(2.0**-53, 2.0**-1022, 2.0**-52),
}


def lse_dtype(dtype):
    """Return the dtype of lse: float32, float64 for float64 inputs."""
    return np.promote_types(dtype, np.float32)
