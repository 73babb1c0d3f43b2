"""Which pairs dropout drops, one by one, in several tiles of keys.

Probes (helpers/visibility.py): scores are 0, a pair that is kept counts 2.
"""

import numpy as np
import pytest

import cuflash
from cuflash.reference.dropout import Dropout
from helpers import visibility as probe
from helpers.visibility_grids import of

# Both words of it are negative, if a signed word holds one.
SEED = 2**64 - 2**31 + 7


def check_forward(backend, z, q, k, v, dout, **options):
    """out, times the number of keys, is the sum of codes times z."""
    q, k, placed = map(backend.place, (q, k, v))
    out = backend.fetch(cuflash.forward(q, k, placed, **options))
    got = np.asarray(out[0, :, 0], np.float64) * z.shape[1]
    sums = z @ np.asarray(v[0, :, 0], np.float64)
    # bfloat16 of out: 2^-9; the rounding of a quotient, far less. A pair is 2.
    near = np.abs(got - sums) <= 2.0**-8 * np.abs(sums)
    probe.report(~near, "out", got, sums, "sums of codes (query, column)")


@of("forward", "backward")
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 1.0}], ids=["alone", "capped"]
)
def test_dropped_pairs(backend, grid, options):
    """Also where a warp keeps its rows' maximum; softcap(0) is 0."""
    seqlen_q, seqlen_k = grid.tile.block_q + 1, 2 * grid.tile.block_k + 1
    arrays = probe.arrays(grid.dtype, 1, seqlen_q, seqlen_k)
    z = Dropout(0.5, SEED).factors(np.arange(seqlen_q), np.arange(seqlen_k))
    check = {"forward": check_forward, "backward": probe.check_backward}
    options = {**options, "dropout": 0.5, "seed": SEED}
    with backend.running(grid.case):
        check[grid.direction](backend, z, *arrays, **options)
