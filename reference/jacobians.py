r"""The derivative of a matrix with respect to a matrix, and its collapse.

It has four indices, [000]'s (2, 2) tensor: entry (i, j, k, l) is

.. math:: \partial C_{ij} / \partial A_{kl}.

For C (m, n) and A (p, q) these are m n p q numbers, too many to store: 2^40
for S and P of 1,024 tokens. A gradient dC contracts with it at once,

.. math:: dA_{kl} = \sum_{ij} dC_{ij}\, \partial C_{ij} / \partial A_{kl},

and the deltas in it leave a product of matrices. So the functions of this
module, which do build the tensor, are for small matrices; `attention` states
what remains of them.

Sources: [000], "The language of tensors" and "The collapse: (2,2) to (1,1)";
[001], "Gradient calculations"; [003], eq. 13 to 21.

Example
-------
The steps of the backward pass, each as a contraction:

>>> import numpy as np
>>> from cuflash.reference import jacobians, softmax
>>> rng = np.random.default_rng(0)
>>> s, v, do = (rng.standard_normal(n) for n in ((3, 4), (4, 2), (3, 2)))
>>> p = softmax.safe_softmax(s)  # O = P V
>>> by_v = jacobians.of_right_factor(p, v)
>>> by_v.shape
(3, 2, 4, 2)
>>> np.allclose(jacobians.contract(do, by_v), p.T @ do)
True
>>> dp = jacobians.contract(do, jacobians.of_left_factor(p, v))
>>> np.allclose(dp, do @ v.T)
True
>>> ds = jacobians.contract(dp, jacobians.of_softmax(p))
>>> np.allclose(ds, softmax.softmax_vjp(dp, p))
True
"""

from __future__ import annotations

import numpy as np


def of_itself(rows: int, columns: int) -> np.ndarray:
    r"""Return the derivative of a matrix with respect to itself.

    .. math::
        \partial A_{is} / \partial A_{kl} = \delta_{ik} \delta_{sl}

    [000], "The language of tensors": the fundamental identity.

    Parameters
    ----------
    rows, columns : int

    Returns
    -------
    ndarray, (rows, columns, rows, columns)
    """
    return np.einsum("ik,sl->iskl", np.eye(rows), np.eye(columns))


def of_left_factor(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    r"""Return the derivative of C = A B with respect to A.

    .. math:: \partial C_{ij} / \partial A_{kl} = \delta_{ik} B_{lj}

    [000], "Derivative of a matrix product": row i of C depends on row i of A
    alone.

    Parameters
    ----------
    a : ndarray, (m, n)
        Only its shape matters.
    b : ndarray, (n, columns)

    Returns
    -------
    ndarray, (m, columns, m, n)
    """
    return np.einsum("ik,lj->ijkl", np.eye(len(a)), b)


def of_right_factor(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    r"""Return the derivative of C = A B with respect to B.

    .. math:: \partial C_{ij} / \partial B_{kl} = A_{ik} \delta_{jl}

    [000], "Deriving dV", where A is P and B is V.

    Parameters
    ----------
    a : ndarray, (m, n)
    b : ndarray, (n, columns)
        Only its shape matters.

    Returns
    -------
    ndarray, (m, columns, n, columns)
    """
    return np.einsum("ik,jl->ijkl", a, np.eye(b.shape[1]))


def of_softmax(p: np.ndarray) -> np.ndarray:
    r"""Return the derivative of P = softmax(S) with respect to S.

    .. math::
        \partial P_{kl} / \partial S_{rt}
        = P_{kl} \delta_{kr} (\delta_{lt} - P_{kt})

    [001], "Gradient calculations"; [003], eq. 20, of one row.

    Parameters
    ----------
    p : ndarray, (rows, keys)
        The weights that softmax returned.

    Returns
    -------
    ndarray, (rows, keys, rows, keys)
    """
    rows, keys = p.shape
    same_key = np.einsum("kl,lt->klt", p, np.eye(keys))
    of_rows = same_key - p[:, :, None] * p[:, None, :]
    return np.einsum("klt,kr->klrt", of_rows, np.eye(rows))


def contract(dc: np.ndarray, jacobian: np.ndarray) -> np.ndarray:
    r"""Return the vector-Jacobian product of a gradient.

    .. math:: dA_{kl} = \sum_{ij} dC_{ij}\, \partial C_{ij} / \partial A_{kl}

    [000], "The collapse: (2,2) to (1,1)".

    Parameters
    ----------
    dc : ndarray, (m, n)
    jacobian : ndarray, (m, n, p, q)

    Returns
    -------
    ndarray, (p, q)
    """
    return np.einsum("ij,ijkl->kl", dc, jacobian)
