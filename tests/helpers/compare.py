"""Comparing a result with the reference, as CONTRIBUTING ("Error") says.

First the indices of NaN and inf, then the error of each finite element:

    |got - ref| <= max(factor * max|low - ref|, tiny)

with the largest error of `low` (low.py) in the element's row, and the
element's own `tiny` (rounding.py). The larger of the two, not their sum:
`tiny` is derived for the whole error.
"""

from typing import NamedTuple

import numpy as np

OUT_FACTOR = 2  # CONTRIBUTING: twice the error of plain code for out,
GRADIENT_FACTOR = 3  # three times for gradients


class Expected(NamedTuple):
    """The expected result, and its tolerance.

    tiny : an array that broadcasts to `ref`.
    """

    ref: np.ndarray
    low: np.ndarray
    tiny: np.ndarray
    factor: float

    def of_low(self):
        """Return the largest finite error of `low` in each row.

        A row is the last axis, of several; an array of one axis has no rows.
        """
        with np.errstate(invalid="ignore"):  # inf - inf
            error = np.abs(np.asarray(self.low, np.float64) - self.ref)
        error = np.where(np.isfinite(error), error, 0)
        if error.ndim < 2:
            return error
        return error.max(axis=-1, keepdims=True, initial=0)

    def at(self, index):
        """Return the same of a part of the array."""
        arrays = (
            self.ref,
            self.low,
            np.broadcast_to(self.tiny, self.ref.shape),
        )
        return Expected(*(x[index] for x in arrays), self.factor)

    def bound(self):
        """Return the largest error allowed of each element."""
        allowed = np.maximum(self.factor * self.of_low(), self.tiny)
        return np.broadcast_to(allowed, np.shape(self.ref))


def assert_matches(got, expected, name, case="", kinds=True):
    """Assert that `got` is the expected array; report the worst element.

    kinds : False where NaN may stand for inf: in sums of inf that a
        rounding's sign turns from one into the other.
    """
    ref = expected.ref
    assert got.shape == ref.shape, f"{name} is {got.shape}, not {ref.shape}"
    assert_same_nonfinite(got, ref, name, case, kinds)
    finite = np.isfinite(ref)
    if not finite.any():
        return
    error = np.zeros(ref.shape)
    error[finite] = np.abs(np.asarray(got, np.float64)[finite] - ref[finite])
    bound = expected.bound()
    # The element furthest beyond its bound, if any is.
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert error[worst] <= bound[worst], (
        f"{name}{indices(worst)}: got {got[worst]!r}, reference "
        f"{ref[worst]!r}, error {error[worst]:.3g} > bound "
        f"{bound[worst]:.3g} ({case})"
    )


def assert_within(got, wanted, bound, name, case=""):
    """Assert that each element is within its bound of the wanted one."""
    wanted = np.broadcast_to(np.asarray(wanted, np.float64), np.shape(got))
    assert_matches(got, Expected(wanted, wanted, bound, 0), name, case)


def assert_at_most(error, bound, name, case=""):
    """Assert that no error is above its bound, nor NaN; report the worst."""
    error, bound = np.broadcast_arrays(on_host(error), on_host(bound))
    within = error <= bound
    if not within.all():
        excess = np.where(np.isnan(error), np.inf, error - bound)
        worst = np.unravel_index(np.argmax(excess), error.shape)
        raise AssertionError(
            f"{name}{indices(worst)}: error {error[worst]:.3g} > bound "
            f"{bound[worst]:.3g}, as are {(~within).sum() - 1} more of "
            f"{error.size} ({case})"
        )


def assert_forward_matches(got, expected, case="", kinds=True):
    """Assert that (out, lse) are the expected ones."""
    for name, *pair in zip(("out", "lse"), got, expected, strict=True):
        assert_matches(*pair, name, case, kinds)


def assert_gradients_match(got, expected, case="", kinds=True):
    """Assert that dq, dk, dv, and dbias and dsink if any, match."""
    given = getattr(case, "arrays_of", ())
    more = [f"d{x}" for x in ("bias", "sink") if x in given]
    names = "dq", "dk", "dv", *more
    for name, *pair in zip(names, got, expected, strict=True):
        assert_matches(*pair, name, case, kinds)


def assert_same_nonfinite(got, ref, name, case="", kinds=True):
    """Assert NaN, +inf, -inf (or just non-finite) at the same indices."""
    tests = {"NaN": np.isnan, "inf": np.isposinf, "-inf": np.isneginf}
    if not kinds:
        tests = {"finite": np.isfinite}
    wide = np.asarray(got, np.float64)  # bfloat16 lacks some of the tests
    for what, test in tests.items():
        wrong = np.argwhere(test(wide) != test(ref))
        if len(wrong):
            first = tuple(wrong[0])
            raise AssertionError(
                f"{name}: {len(wrong)} of {ref.size} elements differ in being "
                f"{what}; the first is {indices(first)}: got {got[first]}, "
                f"reference {ref[first]} ({case})"
            )


def on_host(array):
    """Return an array of any library as NumPy's; bfloat16 of PyTorch wider."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().resolve_neg()
        if array.is_floating_point() and array.itemsize == 2:
            array = array.float()
        return array.numpy()
    return np.asarray(array.get() if hasattr(array, "get") else array)


def assert_all(got, wanted, name, case=""):
    """Assert that every element is the wanted one, also where that is NaN."""
    got, wanted = _broadcast(got, wanted)
    both_nan = (got != got) & (wanted != wanted)
    _assert_right((got == wanted) | both_nan, got, name, wanted, case)


def assert_elements(got, wanted, name, case=""):
    """The same, but that NaN is no element's wanted value."""
    got, wanted = _broadcast(got, wanted)
    _assert_right(got == wanted, got, name, wanted, case)


def assert_arrays_equal(got, wanted, name, case=""):
    """`assert_all` of arrays of one shape, or of one number."""
    wanted, shape = on_host(wanted), np.shape(got)
    if wanted.ndim:
        assert shape == wanted.shape, (
            f"{name} is {tuple(shape)}, not {wanted.shape} ({case})"
        )
    assert_all(got, wanted, name, case)


def assert_allclose(got, wanted, name, rtol=0, atol=0, case=""):
    """Assert errors of at most atol + rtol |wanted|; NaN and inf are alike."""
    got, wanted = _broadcast(got, wanted)
    wide = wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        bound = atol + rtol * np.abs(np.where(np.isfinite(wide), wide, 0))
    assert_within(got, wide, bound, name, case)


def assert_finite(got, name, case=""):
    """Assert that no element is NaN or infinite."""
    got = on_host(got)
    right = np.isfinite(got.astype(np.float64))
    finite = np.broadcast_to("a finite number", got.shape)
    _assert_right(right, got, name, finite, case)


def _broadcast(got, wanted):
    """Return both on the host, in the shape of both."""
    return np.broadcast_arrays(on_host(got), on_host(wanted))


def _assert_right(right, got, name, wanted, case):
    """Report the first element that is not right, and how many are not."""
    wrong = np.argwhere(~np.asarray(right))
    if len(wrong):
        first = tuple(wrong[0])
        raise AssertionError(
            f"{name}{indices(first)}: got {got[first]}, wanted "
            f"{wanted[first]}; {len(wrong)} of {got.size} elements are wrong"
            + (f" ({case})" if case else "")
        )


def assert_bitwise(got, other, name):
    """Assert the same bits in every element, NaN included."""
    kinds = [(x.shape, x.dtype) for x in (got, other)]
    assert kinds[0] == kinds[1], f"{name} is {kinds[0]}, not {kinds[1]}"
    bits = f"u{got.dtype.itemsize}"
    a, b = (np.ascontiguousarray(x).view(bits) for x in (got, other))
    wrong = np.argwhere(a != b)
    assert not len(wrong), (
        f"{name}: {len(wrong)} of {a.size} elements differ in bits; the first "
        f"is {indices(wrong[0])}: {got[tuple(wrong[0])]!r} and "
        f"{other[tuple(wrong[0])]!r}"
    )


def indices(index):
    return "[" + ", ".join(str(int(i)) for i in index) + "]"
