"""What a failed comparison says: array, index, got, wanted, bound, case."""

import numpy as np
import pytest

from helpers.compare import (
    Expected,
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_at_most,
    assert_elements,
    assert_finite,
    assert_matches,
    assert_within,
)
from helpers.data import Case

CASE = Case(seed=7)
GOT = np.array([[1.0, 2.0], [3.0, 4.5]], np.float32)


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (
            lambda: assert_within(GOT, [[1, 2], [3, 4]], 0.25, "dq", CASE),
            "dq[1, 1]: got np.float32(4.5), reference np.float64(4.0), "
            "error 0.5 > bound 0.25 (Case(seed=7))",
        ),
        (
            lambda: assert_all(GOT, [1, 2], "lse", CASE),
            "lse[1, 0]: got 3.0, wanted 1; 2 of 4 elements are wrong "
            "(Case(seed=7))",
        ),
        (
            lambda: assert_finite(GOT * [np.nan, 1], "out", CASE),
            "out[0, 0]: got nan, wanted a finite number; 2 of 4 elements are "
            "wrong (Case(seed=7))",
        ),
        (
            lambda: assert_at_most(GOT, 2, "dk", CASE),
            "dk[1, 1]: error 4.5 > bound 2, as are 1 more of 4 (Case(seed=7))",
        ),
        (
            lambda: assert_elements(GOT * np.nan, np.nan, "dv"),
            "dv[0, 0]: got nan, wanted nan; 4 of 4 elements are wrong",
        ),
        (
            lambda: assert_arrays_equal(GOT, [1, 2], "out", CASE),
            "out is (2, 2), not (2,) (Case(seed=7))",
        ),
        (
            lambda: assert_allclose(GOT, [[1, 2], [3, 4]], "out", rtol=0.1),
            "out[1, 1]: got np.float32(4.5), reference np.float64(4.0), "
            "error 0.5 > bound 0.4 ()",
        ),
    ],
    ids=[
        "within",
        "all",
        "finite",
        "at_most",
        "elements",
        "shape",
        "allclose",
    ],
)
def test_message(check, said):
    with pytest.raises(AssertionError) as raised:
        check()
    assert str(raised.value) == said


def test_each_row_has_its_own_bound():
    """An error of 0.5 passes beside an error of `low`, not in another row."""
    ref, tiny = np.zeros((2, 3)), np.full((2, 3), 0.1)
    low = ref + [[0.25], [0]]
    assert_matches(ref + [[0.5], [0.1]], Expected(ref, low, tiny, 2), "out")
    with pytest.raises(AssertionError, match=r"out\[1, 0\]"):
        assert_matches(ref + 0.5, Expected(ref, low, tiny, 2), "out")
