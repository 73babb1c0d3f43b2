r"""Arithmetic intensity: operations per element that crosses slow memory.

[000] asks for it in two quizzes, of the loop orders of a matrix product and
of attention, and gives no answer. Here are answers in the model of `traffic`.
Each multiplication and each addition is an operation. C = A B of n x n
matrices, in blocks of B x B::

    inner product, B = 1             2 n^3 / (2 n^3 + n^2)        below 1
    blocks                           2 n^3 / (2 n^3 / B + n^2)    below B
    outer products, C in registers   2 n^3 / (2 n^2 + n^2)        2 n / 3

and attention of T tokens with head_dim d, in tiles of B, to leading order for
T much larger than B and d::

    forward, 4 T^2 d                 backward, 10 T^2 d
    materialised    d                materialised   8 d / 7 (8 T^2 d)
    query-outer     2 B              query-outer    5 B / 3
    key-outer       4 B / 3          key-outer      5 B / 2

Materialised, it does not grow with the fast memory; tiled, it does. Divide by
the bytes of an element and compare with `roofline.ridge`: on an A100, 153
operations per byte. At 2 bytes a materialised forward pass has d / 2 of them,
32 for d = 64; query-outer has B.

Sources: [000], "Quizzes"; [001], "Block computation"; [R] Williams, Waterman
and Patterson 2009, doi:10.1145/1498765.1498785.

Example
-------
A product of 64 x 64 matrices; larger blocks, fewer loads:

>>> import numpy as np
>>> from cuflash.reference import intensity, traffic
>>> a, b = np.random.default_rng(0).standard_normal((2, 64, 64))
>>> for block in (1, 8, 64):
...     blocks = {"block_m": block, "block_n": block, "block_k": 8}
...     slow = intensity.block_product(a, b, **blocks)
...     counts = traffic.counts_of(slow)
...     done = intensity.product_flops(64, 64, 64)
...     print(counts["a"].loads, round(intensity.of(done, counts), 2))
262144 0.99
32768 7.53
4096 42.67

Forward attention, 4,096 tokens, head_dim 64, tiles of 128:

>>> z = traffic.Sizes(4096, 4096, 64, 64, block_q=128, block_k=128)
>>> done = intensity.forward_flops(z)
>>> for name in ("materialised", "query_outer", "key_outer"):
...     counts = getattr(traffic, f"forward_{name}_counts")(z)
...     print(name, round(intensity.of(done, counts)))
materialised 63
query_outer 248
key_outer 164
"""

from __future__ import annotations

import numpy as np

from .masks import tile_slices
from .traffic import Count, Counts, Memories, Sizes, memories_of, total


def of(flops: int, counts: Counts) -> float:
    """Return operations per element loaded or stored; 0 if there is none.

    Parameters
    ----------
    flops : int
    counts : dict of str to Count
    """
    moved = total(counts)
    return flops / moved if moved else 0.0


# ------------------------------------------------------------ matrix product


def block_product(
    a: np.ndarray,
    b: np.ndarray,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
) -> Memories:
    r"""Multiply block by block.

    .. math:: C_{ij} = \sum_k A_{ik} B_{kj}

    [001], "Block computation": a pair of blocks is loaded, multiplied and
    added to C_ij, which stays in fast memory until it is complete. With
    blocks of 1 x 1 these are the inner products of [000]; with block_m and
    block_n as large as C they are its outer products.

    Parameters
    ----------
    a : ndarray, (m, k)
    b : ndarray, (k, n)
    block_m, block_n, block_k : int
        Sizes of a block; they need not divide m, n and k.

    Returns
    -------
    dict of str to Memory
        a, b, c.
    """
    slow = memories_of(a=a, b=b, c=np.zeros((len(a), b.shape[1])))
    for i in tile_slices(len(a), block_m):
        for j in tile_slices(b.shape[1], block_n):
            c_ij = np.zeros((i.stop - i.start, j.stop - j.start))
            for k in tile_slices(len(b), block_k):
                c_ij += slow["a"].load((i, k)) @ slow["b"].load((k, j))
            slow["c"].store((i, j), c_ij)
    return slow


def block_product_counts(
    m: int, n: int, k: int, *, block_m: int, block_n: int
) -> Counts:
    """Return the counts: A once per block column of C, B once per block row.

    block_k changes what must fit into fast memory, but no count.

    Parameters
    ----------
    m, n, k : int
        A is (m, k), B (k, n).
    block_m, block_n : int
    """
    return {
        "a": Count(m * k * -(-n // block_n), 0),
        "b": Count(k * n * -(-m // block_m), 0),
        "c": Count(0, m * n),
    }


def product_flops(m: int, n: int, k: int) -> int:
    """Return 2 m n k: a multiplication and an addition for each term."""
    return 2 * m * n * k


# ----------------------------------------------------------------- attention


def forward_flops(z: Sizes) -> int:
    """Return the operations of S = Q K^T and O = P V: 4 T^2 d if d_v = d."""
    return 2 * z.scores * (z.head_dim + z.head_dim_v)


def backward_flops(z: Sizes) -> int:
    """Return the operations of S, dV, dP, dQ and dK: 10 T^2 d if d_v = d.

    S is recomputed; a materialised backward pass reads P and does 8 T^2 d.
    """
    return 2 * z.scores * (3 * z.head_dim + 2 * z.head_dim_v)
