"""The kernels that meet the probes of visibility, and their tiles' edges."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from cuflash.plans.plan import device_of_arch, legal_tiles, plan

from .backends import EMULATED
from .data import Case, Emulation
from .kernels import small_problem
from .visibility import HEAD_DIM, check_backward, check_forward, pairs
from .visibility_derivatives import check_double_backward, check_jvp

CHECKS = {
    "forward": check_forward,
    "backward": check_backward,
    "jvp": check_jvp,
    "double_backward": check_double_backward,
}
# A family's dtype and architecture.
FAMILIES = {
    "simt": ("float32", "sm_75"),
    "fma": ("float32", "sm_80"),
    "mma8_float64": ("float64", "sm_80"),
    "sm80": ("bfloat16", "sm_80"),
    "sm90": ("bfloat16", "sm_90a"),
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

        Derivatives have the planned one.

        Hopper's forward tile has two consumer warpgroups of 64 queries, of
        which a head's first or last tile may leave one without rows.
        """
        arch = FAMILIES[self.family][1]
        problem = small_problem(self.direction, self.dtype, HEAD_DIM)
        if self.direction in ("jvp", "double_backward"):
            return plan(problem, device_of_arch(arch), self.family).tile
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
        return (self.family, self.direction) == ("sm90", "forward")

    @property
    def case(self):
        tiles = {}
        if self.direction in ("forward", "backward"):
            tiles = {f"{self.direction}_tile": self.tile}
        arch = FAMILIES[self.family][1]
        return Case(
            self.dtype, on=Emulation(arch, family=self.family, **tiles)
        )

    def check(self, backend, seen, arrays, **options):
        """Assert that exactly the pairs of `seen` are added up."""
        CHECKS[self.direction](backend, seen, *arrays, **options)

    def check_packed(self, backend, seen, arrays, **options):
        """The same of packed sequences, which have no batch axis."""
        placed = _Packed(backend)
        self.check(placed, seen, arrays, **options)


def of(*directions, families=tuple(FAMILIES)):
    """Run a test on each family's kernel of each direction."""
    return pytest.mark.parametrize(
        ("backend", "grid"),
        [
            pytest.param(
                *EMULATED.values,
                Grid(*choice),
                marks=EMULATED.marks,
                id="-".join([*choice, "emulated"]),
            )
            for choice in product(families, directions)
        ],
    )


on_families = of(*CHECKS)


def around(*edges):
    """Return the lengths one before, at and one after each edge of tiles."""
    return [x + one for x in edges for one in (-1, 0, 1)]


def windows_at_edges(tile, seqlen_q, seqlen_k):
    """Return the left bounds that meet all edges of tiles, and the right ones.

    The last query of a key and the first key of a query follow from the left
    bound, the others from the right one, each moved by the lengths'
    difference.
    """
    shift = seqlen_k - seqlen_q
    of_q, of_k = (seqlen_q, tile.block_q), (seqlen_k, tile.block_k)
    bounds = range(seqlen_q + seqlen_k)
    left = {x: _met(of_k, x + 1 - shift, of_q, "end of queries")
            | _met(of_q, shift - x, of_k, "first key")
            for x in bounds}  # fmt: skip
    right = {x: _met(of_q, x + 1 + shift, of_k, "end of keys")
             | _met(of_k, -shift - x, of_q, "first query")
             for x in bounds}  # fmt: skip
    return _fewest(left), _fewest(right)


def _met(rows, step, others, name):
    """Return which edges rows' ends meet: how far before or after each is.

    Of a tile's first and last rows, and of the last there is. An edge has a
    tile on either side.
    """
    (length, block), (end, other) = rows, others
    found = set()
    for row in range(length):
        edge = round((row + step) / other) * other
        after = row + step - edge
        if abs(after) > 1 or not 0 < edge < end:
            continue
        places = {"first": row % block == 0, "last": (row + 1) % block == 0,
                  "end": row == length - 1}  # fmt: skip
        found |= {(name, x, after) for x, is_at in places.items() if is_at}
    return found


def _fewest(met):
    """Return few bounds that meet what all do, by greed, in order.

    The largest of equals: windows with whole tiles inside.
    """
    left, chosen = set().union(*met.values()), []
    while left:
        chosen.append(max(met, key=lambda x: (len(met[x] & left), x)))
        left -= met[chosen[-1]]
    return sorted(chosen)


def packed_lengths(grid):
    """Return sequences of all lengths around a tile's edge, end to end.

    Their pairs, causal, and cu_seqlens of queries and of keys. Short ones
    come first: a warp finds the others in two rounds, as it tests 32 offsets
    in each.
    """
    of_q, of_k = around(grid.tile.block_q), around(grid.tile.block_k)
    short = [(1, 0), (0, 0), (0, 1), (1, 2)] * 7
    return packed([*short, *product((0, *of_q), of_k)])


def packed(lengths):
    """Return the pairs, causal, and the offsets of sequences of lengths."""
    cu_q, cu_k = (np.append(0, np.cumsum(x)).astype(np.int32)
                  for x in np.transpose(lengths))  # fmt: skip
    seen = np.zeros((cu_q[-1], cu_k[-1]), bool)
    for i, (seqlen_q, seqlen_k) in enumerate(lengths):
        at = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        seen[at] = pairs(seqlen_q, seqlen_k, causal=True)
    return seen, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


class _Packed:
    """A backend whose arrays lose the batch axis, and get it back."""

    def __init__(self, backend):
        self.backend = backend

    def place(self, array):
        return self.backend.place(array[0])

    def fetch(self, array):
        return self.backend.fetch(array)[None]
