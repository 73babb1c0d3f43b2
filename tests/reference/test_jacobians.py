"""Derivatives with four indices: entries, differences, contractions."""

import numpy as np

from cuflash.reference import jacobians
from cuflash.reference.softmax import safe_softmax, softmax_vjp
from helpers.compare import assert_all, assert_allclose, assert_arrays_equal

RNG = np.random.default_rng(0)
A, B, DC = (
    RNG.integers(-9, 10, n).astype(float) for n in ((3, 4), (4, 2), (3, 2))
)


def one(shape, *index):
    """Return a matrix of zeros with a single one."""
    unit = np.zeros(shape)
    unit[index] = 1
    return unit


def test_of_itself_is_two_deltas():
    jacobian = jacobians.of_itself(3, 2)
    assert jacobian.shape == (3, 2, 3, 2)
    for k, l in np.ndindex(3, 2):  # noqa: E741
        expected = one((3, 2), k, l)
        assert_arrays_equal(
            jacobian[:, :, k, l], expected, "jacobian[:, :, k, l]"
        )


def test_of_left_factor_is_the_difference():
    # C is linear in A, and integers are exact: a step of 1 is the derivative.
    jacobian = jacobians.of_left_factor(A, B)
    assert jacobian.size == 3 * 2 * 3 * 4  # m n p q
    for k, l in np.ndindex(*A.shape):  # noqa: E741
        step = (A + one(A.shape, k, l)) @ B - A @ B
        assert_arrays_equal(jacobian[:, :, k, l], step, "jacobian[:, :, k, l]")


def test_of_right_factor_is_the_difference():
    jacobian = jacobians.of_right_factor(A, B)
    for k, l in np.ndindex(*B.shape):  # noqa: E741
        step = A @ (B + one(B.shape, k, l)) - A @ B
        assert_arrays_equal(jacobian[:, :, k, l], step, "jacobian[:, :, k, l]")


def test_row_of_the_product_depends_on_its_own_row_alone():
    # [000]: row i of C only depends on row i of A.
    jacobian = jacobians.of_left_factor(A, B)
    for i, k in np.ndindex(3, 3):
        assert jacobian[i, :, k].any() == (i == k)


def test_contractions_are_products_of_matrices():
    by_a = jacobians.contract(DC, jacobians.of_left_factor(A, B))
    by_b = jacobians.contract(DC, jacobians.of_right_factor(A, B))
    assert_arrays_equal(by_a, DC @ B.T, "by_a")  # dP = dO V^T
    assert_arrays_equal(by_b, A.T @ DC, "by_b")  # dV = P^T dO


def test_chain_rule_contracts_from_the_outside():
    # D = (A B) E: of D by A, contracted in either order.
    e = np.arange(6.0).reshape(2, 3)
    by_c = jacobians.of_left_factor(A @ B, e)
    by_a = jacobians.of_left_factor(A, B)
    dd = np.arange(9.0).reshape(3, 3)
    whole = np.einsum("abij,ijkl->abkl", by_c, by_a)
    expected = jacobians.contract(jacobians.contract(dd, by_c), by_a)
    assert_arrays_equal(jacobians.contract(dd, whole), expected, "dd")


def test_of_softmax_is_its_vjp_and_of_one_row():
    s, dp = RNG.standard_normal((2, 3, 4))
    p = safe_softmax(s)
    jacobian = jacobians.of_softmax(p)
    expected = np.diag(p[1]) - np.outer(p[1], p[1])  # [003], eq. 20
    assert_arrays_equal(jacobian[1, :, 1], expected, "jacobian[1, :, 1]")
    assert_all(jacobian[1, :, 0], 0, "jacobian[1, :, 0]")
    # Sums of 12 products below 4, in another order: 2 * 12 * 4 EPS.
    ds = jacobians.contract(dp, jacobian)
    assert_allclose(ds, softmax_vjp(dp, p), "ds", atol=96 * 2.0**-53)
