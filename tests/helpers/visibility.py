"""Probes: calls whose results tell exactly which pairs were visible.

Scores are 0 and every number is a small integer, so each sum is exact in any
order and dtype. One pair too many or too few changes

    lse         the logarithm of the number of keys that a query sees,
    out, dq     sums of the codes of these keys,
    dk, dv      sums of the codes of the queries that see a key.

Codes are 1 or -1, drawn once for each index: another set of the same size has
other sums in some of 15 columns. For backward, lse is 0 and out is 0, so P is
1 at each visible pair and delta is 0; dout . v is 1, so dS is 1 too.

Columns, of 32: scores vanish because q and k are coded in different ones.

    q     codes     0
    k     0         codes
    v     codes     1 0 ...
    dout  0         1 codes
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

import cuflash
from cuflash.plan import device_of_arch, legal_tiles
from cuflash.reference import masks

from .backends import EMULATED
from .data import Case, Emulation
from .dtypes import DTYPES, lse_dtype
from .kernels import small_problem

HEAD_DIM = 32
HALF = HEAD_DIM // 2

# A family's dtype and architecture.
FAMILIES = {
    "simt": ("float32", "sm_75"),
    "fma": ("float32", "sm_80"),
    "dmma": ("float64", "sm_80"),
    "mma": ("bfloat16", "sm_80"),
    "wgmma": ("bfloat16", "sm_90a"),
}


@dataclass(frozen=True)
class Grid:
    """A family's kernel of one direction, with small tiles."""

    family: str
    direction: str

    @property
    def dtype(self):
        return FAMILIES[self.family][0]

    @property
    def tile(self):
        """Return the smallest of at least 8 x 8: smaller ones are slow.

        Hopper's forward tile has two consumer warpgroups of 64 queries, of
        which a head's first or last tile may leave one without rows.
        """
        arch = FAMILIES[self.family][1]
        problem = small_problem(self.direction, self.dtype, HEAD_DIM)
        legal = legal_tiles(problem, device_of_arch(arch), self.family)
        smallest = 128 if self._two_warpgroups else 8
        return min(
            (x for x in legal if x.block_q >= smallest and x.block_k >= 8),
            key=lambda x: (x.block_q * x.block_k, x.num_warps, x.num_stages),
        )

    @property
    def edges_q(self):
        """Return where tiles of queries may begin, in a head of two."""
        block = self.tile.block_q
        return (64, block) if self._two_warpgroups else (block,)

    @property
    def _two_warpgroups(self):
        return (self.family, self.direction) == ("wgmma", "forward")

    @property
    def case(self):
        tiles = {f"{self.direction}_tile": self.tile}
        return Case(
            self.dtype, on=Emulation(FAMILIES[self.family][1], **tiles)
        )

    def check(self, backend, seen, arrays, **options):
        """Assert that exactly the pairs of `seen` are added up."""
        *qkv, dout = arrays
        if self.direction == "forward":
            check_forward(backend, seen, *qkv, **options)
        else:
            check_backward(backend, seen, *qkv, dout, **options)

    def check_packed(self, backend, seen, arrays, **options):
        """The same of packed sequences, which have no batch axis."""
        placed = _Packed(backend)
        self.check(placed, seen, arrays, **options)


on_families = pytest.mark.parametrize(
    ("backend", "grid"),
    [
        pytest.param(
            *EMULATED.values,
            Grid(*choice),
            marks=EMULATED.marks,
            id="-".join([*choice, "emulated"]),
        )
        for choice in product(FAMILIES, ("forward", "backward"))
    ],
)


def around(*edges):
    """Return the lengths one before, at and one after each edge of tiles."""
    return [x + one for x in edges for one in (-1, 0, 1)]


class _Packed:
    """A backend whose arrays lose the batch axis, and get it back."""

    def __init__(self, backend):
        self.backend = backend

    def place(self, array):
        return self.backend.place(array[0])

    def fetch(self, array):
        return self.backend.fetch(array)[None]


def codes(name, batch, tokens, heads):
    """Return 1 or -1 for each index and column: (batch, tokens, heads, HALF).

    A batch element or a head has the codes of its neighbour, a token on.
    """
    rng = np.random.default_rng([ord(x) for x in name])
    drawn = rng.choice([-1.0, 1.0], (tokens + batch + heads, HALF))
    at = np.add.outer(np.add.outer(range(batch), range(tokens)), range(heads))
    return drawn[at]


def arrays(dtype, batch, seqlen_q, seqlen_k, num_heads_q=1, num_heads_kv=1):
    """Return q, k, v and dout."""
    of_q = batch, seqlen_q, num_heads_q
    of_k = batch, seqlen_k, num_heads_kv
    q, dout = (np.zeros((*of_q, HEAD_DIM)) for _ in range(2))
    k, v = (np.zeros((*of_k, HEAD_DIM)) for _ in range(2))
    q[..., :HALF] = codes("q", *of_q)
    k[..., HALF:] = codes("k", *of_k)
    v[..., :HALF], v[..., HALF] = codes("v", *of_k), 1
    dout[..., HALF:] = codes("dout", *of_q)
    dout[..., HALF] = 1
    return tuple(x.astype(DTYPES[dtype]) for x in (q, k, v, dout))


def pairs(seqlen_q, seqlen_k, **options):
    """Return which query sees which key: bool (seqlen_q, seqlen_k)."""
    return masks.visible(seqlen_q, seqlen_k, **options)


def _per_head(seen, q):
    """Return the visible pairs as float64 (batch, heads, queries, keys)."""
    batch, seqlen_q, heads, _ = q.shape
    seen = np.asarray(seen, np.float64)
    seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
    return np.broadcast_to(seen, (batch, heads, *seen.shape[2:]))


def _heads_first(x, heads):
    x = np.asarray(x, np.float64).swapaxes(1, 2)
    return x.repeat(heads // x.shape[1], axis=1)


def check_forward(backend, seen, q, k, v, more=0, **options):
    """Assert that `forward` adds the visible pairs and no other.

    more : what a sink adds to each row's sum.
    """
    out, lse = cuflash.forward(
        *map(backend.place, (q, k, v)), scale=1.0, return_lse=True, **options
    )
    assert_states(backend.fetch(out), backend.fetch(lse), seen, q, v, more)


def assert_states(out, lse, seen, q, v, more=0):
    """Assert that out and lse are those of the visible pairs."""
    seen = _per_head(seen, q)
    count = seen.sum(-1) + more
    with np.errstate(divide="ignore"):
        # Half a key: far more than the roundings of lse and of the sums.
        apart = np.abs(np.exp(np.asarray(lse, np.float64)) - count) > 0.5
    report(apart, "lse", np.exp(lse), count, "keys (batch, head, query)")
    sums = seen @ _heads_first(v, q.shape[2])
    got = np.asarray(out, np.float64).swapaxes(1, 2) * count[..., None]
    # Rounding to 16 bits: 2^-9 of a sum, which is below 128 here.
    report(np.abs(got - sums) > 0.5, "out", got, sums, "sums of codes")


def check_backward(backend, seen, q, k, v, dout, **options):
    """Assert that `backward` adds the visible pairs and no other."""
    batch, seqlen_q, heads, _ = q.shape
    lse = np.zeros((batch, heads, seqlen_q), lse_dtype(q.dtype))
    seen = _per_head(seen, q)
    # No weight where a row sees nothing: that is what lse says of it.
    lse[~seen.any(-1)] = -np.inf
    placed = map(backend.place, (dout, q, k, v, np.zeros_like(dout), lse))
    got = cuflash.backward(*placed, scale=1.0, **options)
    assert_gradients(map(backend.fetch, got), seen, q, k, dout)


def assert_gradients(got, seen, q, k, dout):
    """Assert that dq, dk and dv are those of the visible pairs."""
    seen = _per_head(seen, q)
    kv = k.shape[2]
    wanted = {
        "dq": seen @ _heads_first(k, q.shape[2]),
        "dk": _of_groups(
            seen.swapaxes(2, 3) @ _heads_first(q, q.shape[2]), kv
        ),
        "dv": _of_groups(
            seen.swapaxes(2, 3) @ _heads_first(dout, q.shape[2]), kv
        ),
    }
    for (name, sums), x in zip(wanted.items(), got, strict=True):
        sums = sums.swapaxes(1, 2).astype(x.dtype).astype(np.float64)
        x = np.asarray(x, np.float64)
        report(x != sums, name, x, sums, "(batch, token, head, column)")


def _of_groups(x, kv):
    """Add up the query heads of each key head."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, kv, heads // kv, *rest).sum(2)


def report(wrong, name, got, wanted, what):
    """Fail with the first wrong element, and how many there are."""
    at = np.argwhere(wrong)
    if len(at):
        first = tuple(int(i) for i in at[0])
        raise AssertionError(
            f"{name}{list(first)}: got {np.asarray(got)[first]:.6g}, want "
            f"{np.asarray(wanted)[first]:.6g} {what}; {len(at)} of "
            f"{np.size(got)} are wrong"
        )
