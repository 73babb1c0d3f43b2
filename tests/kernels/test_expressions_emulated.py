"""The text of drawn functions, compiled: scores, slopes, masks, tiles.

Compiled by the emulator, against the graph evaluated by NumPy with bounds of
rounding (helpers/expression_rounding.py). The bounds do not decide all pairs:
those in doubt are left out.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuflash.expressions import derivative
from expression_strategies import ARRAYS, Drawn, masks, masks_of_ints, scores
from helpers.backends import EMULATED
from helpers.compare import assert_all, assert_allclose
from helpers.drawn import num_examples
from helpers.expression_calls import (
    Pairs,
    given_of,
    gradient_sums,
    mod_arrays,
    recorded,
)
from helpers.expression_kernels import Graphs, evaluate
from helpers.expression_rounding import DOUBLE, FAST, SINGLE, assert_within
from helpers.host_compiler import needs_compiler

pytestmark = needs_compiler

# Of scores, of masks, which have no fast functions, and their dtype.
ARITHMETIC = {
    "float": (SINGLE, SINGLE), "double": (DOUBLE, DOUBLE),
    "bfloat16": (FAST, SINGLE),
}  # fmt: skip
NONE, PARTLY, ALL = 0, 1, 2
QUERIES, KEYS, BLOCK_Q, BLOCK_K = 21, 23, 8, 6
TOGETHER = 10  # functions of a kernel
SEEDS = st.integers(0, 2**16)


def few():
    """As many kernels as other tests compile for a drawn call."""
    return settings(max_examples=num_examples(*EMULATED.values))


def several(strategy):
    return st.lists(strategy, min_size=TOGETHER, max_size=TOGETHER)


def tiles(queries, keys):
    """Return first and last query and key of tiles, cut at the ends."""
    found = [
        (i, min(i + BLOCK_Q, queries) - 1, j, min(j + BLOCK_K, keys) - 1)
        for i in range(0, queries, BLOCK_Q)
        for j in range(0, keys, BLOCK_K)
    ]
    whole = (0, queries - 1, 0, keys - 1)
    single = [(i, i, j, j) for i, j in ((0, 0), (3, 17), (20, 2))]
    rows = [(i, i, 0, keys - 1) for i in (1, 4)]
    columns = [(0, queries - 1, j, j) for j in (2, 9)]
    return np.array([*found, whole, *single, *rows, *columns])


def run(of_scores, of_masks, seed, element, short=False):
    """Return graphs, what the kernel found, and how to bound a graph."""
    values = mod_arrays(seed)
    given, *own = given_of(values)
    arithmetic = ARITHMETIC[element]
    pairs = Pairs.drawn(seed, QUERIES, KEYS, arithmetic[0].real)
    terms = np.random.default_rng(seed).integers(-8, 9, (QUERIES, KEYS)) / 8
    slots = tuple(
        i for i, x in enumerate(sorted(ARRAYS)) if values[x].dtype.kind == "f"
    )
    graphs = [
        Graphs(x and recorded(x, values), y and recorded(y, values), slots)
        for x, y in zip(of_scores, of_masks, strict=True)
    ]
    kinds = tuple(kind for _, kind in given.arrays)
    found = evaluate(
        graphs, kinds, *own, pairs, terms, tiles(QUERIES, KEYS), element,
        short,
    )  # fmt: skip
    return graphs, found, pairs, own, terms


def assert_flags_hold(found, of):
    """Whatever intervals say of a tile, its pairs are so."""
    assert 2 not in found.mask_inside, of
    for i, (q, last_q, k, last_k) in enumerate(tiles(QUERIES, KEYS)):
        visible = found.visible[q : last_q + 1, k : last_k + 1]
        for flag in (found.of_warp[i], found.of_lane[i]):
            assert flag in (NONE, PARTLY, ALL), (of, i, flag)
            assert flag != NONE or not visible.any(), (of, i)
            assert flag != ALL or visible.all(), (of, i)


@pytest.mark.drawn
@pytest.mark.parametrize("element", ARITHMETIC)
@few()
@given(
    of_scores=several(scores()),
    of_masks=several(masks()),
    seed=SEEDS,
    short=st.booleans(),
)
def test_drawn_functions(element, of_scores, of_masks, seed, short):
    arithmetic, of_mask = ARITHMETIC[element]
    graphs, found, pairs, own, terms = run(
        of_scores, of_masks, seed, element, short
    )
    for i, (graph, x) in enumerate(zip(graphs, found, strict=True)):
        of = of_scores[i]
        want = pairs.bounded(graph.score, own, arithmetic)
        assert_within(x.score, want, of)
        assert_within(x.value, want, of, "with its slope")
        assert 2 not in x.inside, of
        slope = derivative.slope(graph.score)
        want = pairs.bounded(slope, own, arithmetic)
        assert_within(x.slope, want, of, "slope")
        for slot, sums in x.dmods.items():
            want = gradient_sums(
                graph.score, slot, terms, pairs, own, arithmetic
            )
            assert_within(sums, want, of, "gradient", slot)
        want = pairs.bounded(graph.mask, own, of_mask)
        assert_within(x.visible, want, of_masks[i])
        assert_flags_hold(x, of_masks[i])


@pytest.mark.drawn
@few()
@given(of_masks=several(masks_of_ints()), seed=SEEDS)
def test_drawn_masks_of_ints_are_exact(of_masks, seed):
    none = [None] * len(of_masks)
    graphs, found, pairs, own, _ = run(none, of_masks, seed, "float")
    for graph, x, of in zip(graphs, found, of_masks, strict=True):
        want = pairs.bounded(graph.mask, own, SINGLE)
        assert_all(want.doubt, False, "doubt", of)
        assert_within(x.visible, want, of)
        assert_flags_hold(x, of)


# Former failures: what was wrong, and a function that showed it.
SCORES = {
    "a gradient of a head's element": "score * curve[h]",
    "the order of bools": "score * (on < (q_idx > 3)).astype(float)",
    "a power of 0": "score + 0.0 ** (w * 0)",
    "branches not taken": "np.log(np.where(q_idx > 3, abs(score) + 1, 0.0))",
    "minus 2^31": "score + np.maximum(q_idx, -(2**31)) * 0.5",
    "64 bits": "score + (kv_idx * 2**40 >> 38) * 0.5",
    "infinity": "np.where(q_idx > kv_idx, score, -np.inf)",
    "NaN": "np.minimum(score, np.log(w - 100))",
    "a constant": "to_real(np.int64(3))",
    "a zero without a sign": "score / -to_real(abs(q_idx - kv_idx))",
    "another": "1.0 / to_real((q_idx - kv_idx) * -2)",
    "a sum of products": "score - to_real(q_idx - kv_idx * 3) * 0.5",
    "an index of reals": "score + curve[to_int(kv_idx * 0.3 + 0.7)]",
    "all inside, some outside": "score + curve[kv_idx % 5] + half[q_idx]",
    "sizes": "score * table.shape[1] / ids.shape[0]",
    "both ends of erf": "special.erf(curve[kv_idx]) - special.erfc(2 * score)",
}
MASKS = {
    "an int16 that is unknown, and 1": "small[q_idx] + 1 > -5",
    "bits that are unknown, and 1": "(q_idx & kv_idx) + 1 > 0",
    "the opposite of what is unknown": "-small[q_idx - kv_idx] < 100",
    "the largest int": "far[q_idx] == 2**63 - 1",
    "a NaN of negative reals": "abs(np.sqrt(q_idx - 10.0)) <= 4",
    "a NaN and what is below": "np.abs(np.log(q_idx - 1.0)) < 3",
    "remainders of large reals": "(q_idx * 1e9) % 7.0 < 3.5",
    "remainders of ints": "q_idx % 16 < 16",
    "a bool and an int": "(q_idx > 3) < n",
    "isnan of an int": "np.isnan(q_idx) | np.isinf(n)",
    "an index that wraps": "flags[q_idx - kv_idx]",
    "an index of 64 bits": "flags[far[q_idx]]",
    "a constant": "q_idx ** 0 > 0",
    "all of a slice": "flags[kv_idx] == flags[kv_idx]",
    "shifts": "(q_idx - kv_idx << 3) >> (q_idx & 3) > 2",
    "sums that wrap": "far[q_idx] + far[kv_idx] > far[q_idx]",
    "differences that wrap": "far[q_idx] - far[kv_idx] > n",
    "products that wrap": "far[q_idx] * (kv_idx + 3) > far[kv_idx]",
    "the opposite of -2^63": "(-far[q_idx] < 0) ^ (far[kv_idx] // -1 < 0)",
    "the size of -2^63": "abs(far[q_idx]) < n",
    "constants that wrap": "q_idx * (2**62 * np.int64(1)) > (-n - 2**62) * 2",
}


@pytest.mark.parametrize(
    ("element", "short"), [("float", True), ("double", False)]
)
def test_former_faults(element, short):
    of_scores = [Drawn("score_mod", x) for x in SCORES.values()]
    of_masks = [Drawn("mask_mod", x) for x in MASKS.values()]
    of_scores += [None] * (len(of_masks) - len(of_scores))
    for seed in range(2):
        graphs, found, pairs, own, _ = run(
            of_scores, of_masks, seed, element, short
        )
        for i, (graph, x) in enumerate(zip(graphs, found, strict=True)):
            of_score, of_mask = ARITHMETIC[element]
            assert_within(
                x.visible, pairs.bounded(graph.mask, own, of_mask), of_masks[i]
            )
            assert_flags_hold(x, of_masks[i])
            if graph.score is None:
                continue
            for got, root in (
                (x.score, graph.score),
                (x.slope, derivative.slope(graph.score)),
            ):
                want = pairs.bounded(root, own, of_score)
                assert_within(got, want, of_scores[i])
            assert 2 not in x.inside, of_scores[i]


# Defined where quotients of equal numbers are 1, divisors not flushed to 0.
EDGES = (
    "score + np.sqrt((q_idx + 35) / (q_idx + 35.0) - 1)",
    "score + np.log((q_idx + 35) / (q_idx + 35.0))",
    "score + np.sqrt((abs(score) + 1.3) / (abs(score) + 1.3) - 1)",
    "score + ((kv_idx + 35) / (kv_idx + 35.0) - 1) ** 0.5",
    "score + score * 0 / (1e-40 * (q_idx + 1))",
    "score + score * 0 / 1e-40",
    "score * ((q_idx + 1) * 1e-40 / (1e-40 * (q_idx + 1)))",
    "score + np.exp(score / 64 + 88) / (1 + np.exp(score / 64 + 88)) - 1",
)


# Slopes of quotients by divisors whose inverse is no normal number.
SLOPES = {
    "score * 1e37 / (1e38 + q_idx)": 0.1,
    "score * 3e37 / (-3e38 - q_idx)": -0.1,
    "score * 1e-41 / (1e-40 + 0.0 * q_idx)": 0.1,
    "score * 0 / (1e-40 + 0.0 * q_idx)": 0.0,
}


def test_quotients_at_the_edge_of_a_domain():
    of_scores = [Drawn("score_mod", x) for x in (*EDGES, *SLOPES)]
    none = [None] * len(of_scores)
    _, found, pairs, *_ = run(of_scores, none, 3, "bfloat16")
    for x, of in zip(found, EDGES, strict=False):
        # exp2_approx errs by 2^-22; of 4 at most are rounded.
        assert_allclose(x.score, pairs.score, of, atol=2.0**-20)
    for x, (of, slope) in zip(
        found[len(EDGES) :], SLOPES.items(), strict=True
    ):
        # 1e-41 has 13 bits.
        assert_allclose(x.slope, 0.0 * x.slope + slope, of, atol=2.0**-13)
        want = pairs.score * slope
        assert_allclose(x.score, want, of, atol=2.0**-13 * abs(want).max())


# Reads, and whether the tile of all pairs has them inside.
READS = {
    "score + table[h, kv_idx % 4]": True,
    "score + table[h, kv_idx % 4 + 6]": False,
    "score + table[h, kv_idx % 4 - 1]": False,
    "score + curve[abs(q_idx - kv_idx) // 2]": True,
    "score + curve[np.clip(q_idx - kv_idx, 0, 14)]": True,
    "score + curve[np.clip(q_idx - kv_idx, 0, 15)]": False,
    "score + curve[np.where(q_idx > kv_idx, q_idx - kv_idx, 0)]": False,
    "score + half[small[q_idx]]": False,
    "score + half[q_idx] * half[kv_idx]": True,
    "score + half[q_idx + 5]": False,
    "score + half[to_int(0.5 * q_idx)]": False,
    "score + half[to_int(score)]": False,
}


def test_reads_that_are_inside():
    of_scores = [Drawn("score_mod", x) for x in READS]
    none = [None] * len(of_scores)
    _, found, *_ = run(of_scores, none, 3, "float")
    whole = [*map(tuple, tiles(QUERIES, KEYS))].index(
        (0, QUERIES - 1, 0, KEYS - 1)
    )
    assert {
        text: bool(x.inside[whole])
        for text, x in zip(READS, found, strict=True)
    } == READS
    assert not any(2 in x.inside for x in found)


# What intervals decide -----------------------------------------------------

# A mask, and whether lanes on their own decide every tile that one kind of
# pairs fills; a warp decides what reads arrays, too.
DECIDED = {
    "causal": ("q_idx >= kv_idx", True),
    "window": ("(q_idx - kv_idx < 9) & (kv_idx - q_idx <= 4)", True),
    "absolute window": ("abs(q_idx - kv_idx) < 7", True),
    "prefix": ("(kv_idx < 5) | (q_idx >= kv_idx)", True),
    "prefix of a head": ("(kv_idx < small[h]) | (q_idx >= kv_idx)", True),
    "documents": ("ids[b, q_idx] == ids[b, kv_idx]", False),
    "causal documents": (
        "(q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])", False),
    "padding": ("kv_idx < seqlen_k - 4", True),
    "rows": ("flags[q_idx]", False),
    "blocks": ("q_idx // 8 == kv_idx // 6", True),
    "a choice": ("np.where(q_idx < 8, kv_idx < 6, q_idx > kv_idx)", True),
    "a real distance": ("(q_idx - kv_idx) * 0.5 <= 2.25", True),
    "what rises": ("special.erf((q_idx - kv_idx) * 0.1) <= 0.5", True),
    "what falls": ("special.erfc((q_idx - kv_idx) * 0.1) <= 0.8", True),
    "nothing": ("q_idx < 0", True),
    "everything": ("kv_idx >= 0", True),
}  # fmt: skip


def decided_masks():
    values = mod_arrays(3) | {
        "ids": np.repeat([[0, 1, 1, 2]], 7, 1).repeat(2, 0).astype(np.int32),
        "flags": np.arange(26) < 16,
        "small": np.full(17, 6, np.int8),
    }
    given, *own = given_of(values)
    pairs = Pairs.drawn(3, QUERIES, KEYS, np.float32)
    graphs = [
        Graphs(None, recorded(Drawn("mask_mod", text), values))
        for text, _ in DECIDED.values()
    ]
    kinds = tuple(kind for _, kind in given.arrays)
    none = np.zeros((QUERIES, KEYS))
    return evaluate(
        graphs, kinds, *own, pairs, none, tiles(QUERIES, KEYS), "bfloat16"
    )


def test_plain_masks_are_decided():
    grid = -(-QUERIES // BLOCK_Q) * -(-KEYS // BLOCK_K)
    for (name, of), x in zip(DECIDED.items(), decided_masks(), strict=True):
        assert_flags_hold(x, name)
        for i, tile in enumerate(tiles(QUERIES, KEYS)[:grid]):
            q, last_q, k, last_k = tile
            visible = x.visible[q : last_q + 1, k : last_k + 1]
            want = ALL if visible.all() else PARTLY if visible.any() else NONE
            assert x.of_warp[i] == want, (name, i)
            assert x.of_lane[i] == want or not of[1], (name, i)


@example(1)
@few()
@given(SEEDS)
def test_a_kernel_serves_other_numbers_and_sizes(seed):
    """Arrays and numbers are read at run time: one text, one program."""
    text = "score * w + curve[q_idx - n] + table[h, kv_idx % table.shape[1]]"
    of_scores = [Drawn("score_mod", text)]
    graphs, found, pairs, own, _ = run(of_scores, [None], seed, "double")
    want = pairs.bounded(graphs[0].score, own, DOUBLE)
    assert_within(found[0].score, want, text)
