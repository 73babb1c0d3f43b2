"""score_mod and mask_mod: values, slopes, gradients of arrays, errors."""

import numpy as np
import pytest
from scipy import special

from cuflash.reference import backward, expressions, forward
from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.double_backward import double_backward
from cuflash.reference.expressions import (
    SCORE,
    Array,
    Dual,
    HeadIndices,
    Place,
)
from cuflash.reference.jvp import jvp
from cuflash.reference.kvcache import forward_kvcache
from cuflash.reference.packed import packed_attention, packed_attention_vjp
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_finite,
)

HEADS = {"heads_first": True}
TILES = {"block_q": 2, "block_k": 3}
RNG = np.random.default_rng(54)
TABLE = RNG.standard_normal((3, 9))
TOKENS = RNG.standard_normal(7)


def inputs(leading=(2, 3), seqlen_q=5, seqlen_k=7):
    rng = np.random.default_rng(0)
    lengths = seqlen_q, seqlen_k, seqlen_k, seqlen_q
    return [rng.standard_normal((*leading, n, 4)) for n in lengths]


def relative(score, b, h, q_idx, kv_idx, *, table):
    return score + table[h, q_idx - kv_idx + 4]


def curved(score, b, h, q_idx, kv_idx, *, table, tokens, factor):
    x = np.tanh(score * tokens[kv_idx]) + table[b, h] * (1 + b)
    return np.where(q_idx > kv_idx, factor * x, score / (1 + x * x))


def leaves(score, b, h, q_idx, kv_idx, *, table):
    return score * table[h, 2 * kv_idx]


def causal(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
    return kv_idx <= q_idx + seqlen_k - seqlen_q


def documents(b, h, q_idx, kv_idx, *, ids):
    return (ids[b, q_idx] == ids[b, kv_idx]) | (h == 2)


SCORES = {
    "relative": (relative, {"table": TABLE}),
    "curved": (curved, {"table": TABLE, "tokens": TOKENS, "factor": 1.5}),
    "leaves": (leaves, {"table": TABLE}),
}


def options_of(name, **others):
    function, arrays = SCORES[name]
    return {"score_mod": function, "mod_arrays": arrays, **HEADS, **others}


# What a built-in option does ------------------------------------------------


def test_a_mask_is_the_option():
    q, k, v, dout = inputs()
    own = {"mask_mod": causal, **HEADS}
    for got, want in zip(
        (*attention(q, k, v, **own), *attention_vjp(dout, q, k, v, **own)),
        (
            *attention(q, k, v, causal=True, **HEADS),
            *attention_vjp(dout, q, k, v, causal=True, **HEADS),
        ),
        strict=True,
    ):
        assert_arrays_equal(got, want, "got")


def test_masks_join():
    q, k, v, _ = inputs()
    ids = np.array([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]])
    mods = {"mask_mod": documents, "mod_arrays": {"ids": ids}}
    got = attention(q, k, v, causal=True, window=(3, 0), **mods, **HEADS)
    same = ids[:, None, :5, None] == ids[:, None, None, :]
    mask = same | (np.arange(3) == 2)[:, None, None]
    want = attention(q, k, v, causal=True, window=(3, 0), mask=mask, **HEADS)
    assert_arrays_equal(got[0], want[0], "out")
    assert_arrays_equal(got[1], want[1], "lse")


def test_visible_keys_are_counted_by_lse():
    q, k, v, _ = (np.zeros_like(x) for x in inputs())
    _, lse = attention(q, k, v, mask_mod=causal, **HEADS)
    counts = np.broadcast_to(np.log(np.arange(3, 8)), lse.shape)
    assert_allclose(lse, counts, "lse", atol=1e-15)


def test_modifications_are_softcap_alibi_and_bias():
    """The slopes are those of the options, and dmod is dbias."""
    q, k, v, dout = inputs()
    slopes, bias = RNG.random(3), RNG.standard_normal((2, 3, 5, 7))

    def modified(score, b, h, i, j, *, cap, slopes, bias):
        x = cap * np.tanh(score / cap)
        return x - slopes[h] * abs(i + 2 - j) + bias[b, h, i, j]

    arrays = {"cap": 2.0, "slopes": slopes, "bias": bias}
    *got, dmod = attention_vjp(
        *(dout, q, k, v),
        score_mod=modified, mod_arrays=arrays, return_dmod=("bias",), **HEADS,
    )  # fmt: skip
    built_in = {"softcap": 2.0, "alibi_slopes": slopes, "bias": bias}
    want = attention_vjp(dout, q, k, v, **built_in, **HEADS)
    for a, b in zip((*got, dmod["bias"]), want, strict=True):
        assert_allclose(a, b, "a", atol=1e-14)


def test_a_score_mod_comes_after_the_options():
    q, k, v, _ = inputs()
    bias, slopes = RNG.standard_normal((5, 7)), RNG.random(3)
    before = {"softcap": 1.0, "alibi_slopes": slopes, "bias": bias}
    seen = []

    def spy(score, b, h, i, j):
        seen.append(score.value)
        return score

    attention(q, k, v, score_mod=spy, causal=True, **before, **HEADS)
    x = np.tanh(q @ np.swapaxes(k, -1, -2) / 2)
    distance = abs(np.arange(5)[:, None] + 2 - np.arange(7))
    want = x - slopes[:, None, None] * distance + bias
    assert_allclose(seen[0], want, "score", atol=1e-15)


# Schedules ------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORES)
def test_every_forward_schedule_equals_attention(name):
    q, k, v, _ = inputs()
    options = options_of(name, mask_mod=causal, sink=np.zeros(3))
    want = attention(q, k, v, **options)
    for schedule, tiles in (
        (forward.row_by_row, {}),
        (forward.query_outer, TILES),
        (forward.key_outer, TILES),
        (forward.split_keys, TILES),
    ):
        got = schedule(q, k, v, **tiles, **options)
        assert_allclose(got[0], want[0], "out", atol=1e-14)
        assert_allclose(got[1], want[1], "lse", atol=1e-14)


@pytest.mark.parametrize("name", SCORES)
def test_every_backward_schedule_equals_the_vjp(name):
    q, k, v, dout = inputs()
    own = {"return_dmod": ("table",), "bias": RNG.standard_normal((5, 7))}
    options = options_of(name, mask_mod=causal, softcap=3.0, **own)
    out, lse = attention(q, k, v, **options)
    *want, dmod = attention_vjp(dout, q, k, v, **options)
    for schedule, tiles in (
        (backward.row_by_row, {}),
        (backward.query_outer, TILES),
        (backward.key_outer, TILES),
        (backward.two_pass, TILES),
    ):
        *got, of_mod = schedule(dout, q, k, v, out, lse, **tiles, **options)
        for a, b in zip(got, want, strict=True):
            assert_allclose(a, b, "gradient", atol=1e-13)
        assert_allclose(of_mod["table"], dmod["table"], "dmod", atol=1e-13)


# Derivatives ----------------------------------------------------------------


MOVED = [
    (name, moved)
    for name, (_, arrays) in SCORES.items()
    for moved in ("q", "k", "v", "bias", *(arrays.keys() - {"factor"}))
]


@pytest.mark.parametrize("name, moved", sorted(MOVED))
def test_gradient_is_the_finite_difference(name, moved):
    """Central differences of a loss of about 1: h^2 and 2^-52 / h."""
    q, k, v, dout = inputs()
    arrays = SCORES[name][1]
    bias = np.random.default_rng(1).standard_normal((5, 7))
    given = {"q": q, "k": k, "v": v, "bias": bias, **arrays}
    direction = np.random.default_rng(2).standard_normal(given[moved].shape)
    options = options_of(name, mask_mod=causal, softcap=3.0)

    def loss(step):
        now = {**given, moved: given[moved] + step * direction}
        four = {x: now.pop(x) for x in ("q", "k", "v", "bias")}
        return dout * attention(**four, **(options | {"mod_arrays": now}))[0]

    names = tuple(x for x in ("table", "tokens") if x in arrays)
    *gradients, dmod = attention_vjp(
        dout, q, k, v, bias=bias, return_dmod=names, **options
    )
    found = dict(zip(("q", "k", "v", "bias"), gradients, strict=True)) | dmod
    difference = (loss(1e-5) - loss(-1e-5)).sum() / 2e-5
    got = (found[moved] * direction).sum()
    assert_allclose(got, difference, "gradient", atol=2e-8)


SMOOTH = {
    "product": lambda x: 3 * x * x - x / 4,
    "quotient": lambda x: 1 / (2 + x * x),
    "power": lambda x: x**3 + 2.0 ** (x / 3),
    "exp": lambda x: np.exp(-x) + np.exp2(x) + np.expm1(x),
    "log": lambda x: np.log(x) + np.log2(x) + np.log1p(x) + np.log10(x),
    "sqrt": lambda x: np.sqrt(1 + x) + np.square(x) + np.reciprocal(x),
    "circle": lambda x: np.sin(x) * np.cos(x) + np.tan(x) + np.arctan(x),
    "hyperbola": lambda x: np.tanh(x) + np.sinh(x) * np.cosh(x),
    "minus": lambda x: -x - (+x),
    "arctan": np.arctan,
    "error": lambda x: special.erf(x) + 3 * special.erfc(x / 2),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_slope_is_the_complex_step(name):
    x = np.linspace(0.1, 1.4, 7)
    found = SMOOTH[name](Dual(x, {SCORE: np.ones(())}))
    value = SMOOTH[name](x + 1e-30j)
    assert_allclose(found.value, value.real, "value", rtol=1e-14)
    slope = np.broadcast_to(found.slopes[SCORE], x.shape)
    assert_allclose(slope, value.imag / 1e-30, "slope", rtol=1e-14)


BRANCHES = {
    "where": (lambda x: np.where(x < 1, 2 * x, 5 * x), [2, 5, 5]),
    "where, inf": (lambda x: np.where(x < 1, -np.inf, x), [0, 1, 1]),
    "minimum": (lambda x: np.minimum(3 * x, x + 2), [3, 3, 1]),
    "minimum, swapped": (lambda x: np.minimum(x + 2, 3 * x), [3, 1, 1]),
    "maximum": (lambda x: np.maximum(x + 2, 3 * x), [1, 1, 3]),
    "maximum of a number": (lambda x: np.maximum(1, x), [0, 0, 1]),
    "abs": (lambda x: abs(x - 1), [-1, 0, 1]),
    "clip": (lambda x: np.clip(x, 1, 1.5), [0, 1, 0]),
    "clip, max": (lambda x: np.clip(x, max=1.5), [1, 1, 0]),
    "floor": (lambda x: x + np.floor(x), [1, 1, 1]),
    "remainder": (lambda x: x % 0.75, [1, 1, 1]),
    "of the divisor": (lambda x: 7.0 % (x + 2), [-3, -2, -1]),
    "floor divide": (lambda x: x // 2 + x, [1, 1, 1]),
    "reals": (lambda x: x.astype(int) * x, [0, 1, 2]),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_slope_is_that_of_the_branch(name):
    function, slopes = BRANCHES[name]
    found = function(Dual([0.0, 1.0, 2.0], {SCORE: np.ones(())}))
    got = np.broadcast_to(found.slopes.get(SCORE, 0.0), 3)
    assert_arrays_equal(got, np.array(slopes, np.float64), "slope")


def test_a_slope_of_0_stays_0():
    x = Dual([0.0, 4.0], {SCORE: np.ones(())})
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (x * np.sqrt(x)).slopes[SCORE]  # not 0 * inf
    assert_arrays_equal(slope, [0.0, 3.0], "slope")


def test_an_array_without_axes_has_a_gradient():
    q, k, v, dout = inputs()

    def scaled(score, b, h, i, j, **arrays):
        return arrays["t"][()] * score

    arrays = {"t": np.array(0.5)}
    *_, dmod = attention_vjp(
        *(dout, q, k, v),
        score_mod=scaled, mod_arrays=arrays, return_dmod=("t",), **HEADS,
    )  # fmt: skip
    ahead, behind = (
        (dout * attention(q, k, v, scale=0.25 + h, **HEADS)[0]).sum()
        for h in (5e-6, -5e-6)
    )
    want = (ahead - behind) / 2e-5
    assert_allclose(dmod["t"], np.array(want), "dt", atol=1e-8)


def test_integers_that_are_cut():
    x = Dual([2**31 - 1, 2**31, -(2**31) - 1, 2**33 + 7])
    got = x.astype(np.int32).value
    assert_arrays_equal(got, [2**31 - 1, -(2**31), 2**31 - 1, 7], "int32")
    for narrow in (np.int8, np.int16, np.uint32, np.uint64):
        with pytest.raises(TypeError, match="wraps: write x.astype"):
            x.astype(narrow)


def test_nan_is_no_branch():
    x = Dual([np.nan, 1.0])
    assert_arrays_equal(np.minimum(x, 2).value, [np.nan, 1.0], "minimum")
    assert_arrays_equal(np.maximum(0, x).value, [np.nan, 1.0], "maximum")


# Indices and arrays ---------------------------------------------------------


def test_an_index_outside_reads_0():
    i = Dual(np.arange(-4, 5))
    read = Array("a", np.array([7, 8, 9]), True)[i]
    assert_arrays_equal(read.value, [0, 7, 8, 9, 7, 8, 9, 0, 0], "read")
    read = Array("a", np.array([True, True]), False)[i]
    assert read.value.dtype == bool
    assert read.value.sum() == 4
    nothing = Array("a", np.zeros((0, 3)), True)[i, 0]
    assert_all(nothing.value, 0, "nothing")


def test_an_index_outside_has_no_gradient():
    q, k, v, dout = inputs()
    options = options_of("leaves", return_dmod=("table",))
    *_, dmod = attention_vjp(dout, q, k, v, **options)
    read = np.arange(9) % 2 == 0  # 2 kv_idx is 0, 2, ... 12
    assert_arrays_equal(
        dmod["table"] != 0, np.broadcast_to(read, (3, 9)), "read"
    )


def test_each_axis_has_an_index():
    a, i = Array("a", np.arange(6).reshape(2, 3), False), Dual(np.arange(2))
    assert_arrays_equal(a[i, i + 1].value, [1, 5], "read")
    assert a.shape == (2, 3)
    with pytest.raises(IndexError, match="a has 2 axes, not 1"):
        a[i]
    with pytest.raises(IndexError, match="an index of a is float64"):
        a[i / 2]


def test_integers_round_down_and_divide_by_zero():
    x, y = Dual([7, -7, 7, -7, 7]), Dual([2, 2, -2, -2, 0])
    with np.errstate(divide="ignore"):
        assert_arrays_equal((x // y).value, [3, -4, -4, 3, 0], "//")
        assert_arrays_equal((x % y).value, [1, 1, -1, -1, 0], "%")
    x = Dual([-1.5, 1.5, np.nan, 1e300])
    assert_arrays_equal(x.astype(int).value, [-1, 1, 0, 0], "int")
    assert_arrays_equal((1 << Dual([-1, 2, 99])).value, [1, 4, 1 << 62], "<<")


def test_numpys_scalars_are_numbers():
    x = Dual([1.0, 3.0])
    assert_arrays_equal((np.float32(2) < x).value, [False, True], "<")
    assert_arrays_equal((np.int64(2) * x).value, [2.0, 6.0], "*")


def test_float16_arrays_are_read_exactly():
    a = np.array([0.1, 2.0], np.float16)
    read = Array("a", a, False)[Dual([0, 1])]
    assert_arrays_equal(np.exp(read).value, np.exp(a.astype(float)), "exp")


# Heads and sequences ---------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_functions_know_batch_and_head(leading):
    q, k, v, _ = inputs(leading)

    def numbered(score, b, h, i, j):
        return 0 * score + np.where(j == 0, 10 * b + h, -np.inf)

    _, lse = attention(q, k, v, score_mod=numbered, **HEADS)
    numbers = np.arange(20).reshape(2, 10)[:, :3]
    want = {0: numbers[0, 0], 1: numbers[0], 2: numbers}[len(leading)]
    want = np.broadcast_to(want[..., None], (*leading, 5))
    assert_arrays_equal(lse, want.astype(float), "lse")


def test_other_axes_need_their_numbers():
    q, k, v, _ = inputs((2, 1, 3))
    with pytest.raises(ValueError, match="needs head_indices"):
        attention(q, k, v, score_mod=relative)
    heads = HeadIndices(np.arange(2)[:, None, None], np.arange(3))
    got, _ = attention(q, k, v, head_indices=heads, **options_of("curved"))
    flat = (x[:, 0] for x in (q, k, v))
    want, _ = attention(*flat, **options_of("curved"))
    assert_arrays_equal(got[:, 0], want, "out")


def test_a_packed_sequence_is_a_batch():
    offsets_q, offsets_k = np.array([0, 2, 2, 5]), np.array([0, 3, 4, 7])
    q, k, v, dout = inputs((3,))
    own = {"mask_mod": causal, "return_dmod": ("table", "tokens")}
    options = options_of("curved", **own)
    out, lse = packed_attention(q, k, v, offsets_q, offsets_k, **options)
    *got, dmod = packed_attention_vjp(
        dout, q, k, v, offsets_q, offsets_k, **options
    )
    sums = {x: 0.0 for x in dmod}
    for b, i, j in (
        (0, slice(0, 2), slice(0, 3)),
        (2, slice(2, 5), slice(4, 7)),
    ):
        one, heads = (q[:, i], k[:, j], v[:, j]), HeadIndices(b, np.arange(3))
        alone = attention(*one, head_indices=heads, **options)
        assert_arrays_equal(out[:, i], alone[0], "out")
        assert_arrays_equal(lse[:, i], alone[1], "lse")
        *want, part = attention_vjp(
            dout[:, i], *one, head_indices=heads, **options
        )
        for x, at, y in zip(got, (i, j, j), want, strict=True):
            assert_arrays_equal(x[:, at], y, "gradient")
        sums = {x: y + part[x] for x, y in sums.items()}
    for name, x in dmod.items():
        assert_allclose(x, sums[name], name, atol=1e-15)


def test_a_cache_has_batches_and_heads():
    q, k, v, _ = inputs()
    options = options_of("curved")
    want, _ = attention(q, k, v, mask_mod=causal, **options)
    del options["heads_first"]
    first = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    got, _ = forward_kvcache(*first, mask_mod=causal, **options)
    assert_allclose(got.swapaxes(1, 2), want, "out", atol=1e-14)


# Masked pairs, other derivatives, errors ------------------------------------


def test_masked_pairs_may_have_any_score():
    q, k, v, dout = inputs()

    def wild(score, b, h, i, j, *, a):
        return np.where(j <= i, score * a[j], np.log(score * 0) / a[j])

    def below(b, h, i, j):
        return j <= i

    options = {"mod_arrays": {"a": np.ones(7)}, "return_dmod": ("a",), **HEADS}
    got = attention_vjp(
        dout, q, k, v, score_mod=wild, mask_mod=below, **options
    )
    want = attention_vjp(dout, q, k, v, mask_mod=below, **HEADS)
    for a, b in zip(got[:3], want, strict=True):
        assert_arrays_equal(a, b, "gradient")
    assert_finite(got[3]["a"], "dmod")


@pytest.mark.parametrize("moved", ["q", "k", "v", "bias"])
def test_jvp_is_the_finite_difference(moved):
    q, k, v, _ = inputs()
    options = options_of("curved", mask_mod=causal, softcap=3.0)
    given = {"q": q, "k": k, "v": v, "bias": RNG.standard_normal((5, 7))}
    dot = RNG.standard_normal(given[moved].shape)
    found = jvp(**given, **{f"{moved}_dot": dot}, **TILES, **options)
    ahead, behind = (
        attention(**(given | {moved: given[moved] + h * dot}), **options)[0]
        for h in (1e-5, -1e-5)
    )
    want = (ahead - behind) / 2e-5
    assert_allclose(found.out_dot, want, "out_dot", atol=1e-8)


@pytest.mark.parametrize("name", SCORES)
def test_arrays_move_in_a_jvp(name):
    q, k, v, _ = inputs()
    function, arrays = SCORES[name]
    dots = {x: RNG.standard_normal(y.shape) for x, y in arrays.items()
            if np.ndim(y)}  # fmt: skip
    options = options_of(name, mask_mod=causal, softcap=3.0)
    found = jvp(q, k, v, mod_dots=dots, **TILES, **options)
    ahead, behind = (
        attention(
            q, k, v, **options
            | {"mod_arrays": arrays | {x: arrays[x] + h * y
                                       for x, y in dots.items()}},
        )
        for h in (1e-5, -1e-5)
    )  # fmt: skip
    for got, a, b in zip(found[2:], ahead, behind, strict=True):
        assert_allclose(got, (a - b) / 2e-5, "tangent", atol=1e-8)


@pytest.mark.parametrize("name", SCORES)
def test_second_gradients_are_finite_differences(name):
    """Of all that moves at once: of q, k, v, a bias and the arrays."""
    q, k, v, dout = inputs()
    function, arrays = SCORES[name]
    given = {"q": q, "k": k, "v": v, "bias": RNG.standard_normal((5, 7))}
    given |= {x: y for x, y in arrays.items() if np.ndim(y)}
    dots = {x: RNG.standard_normal(y.shape) for x, y in given.items()}
    names = tuple(x for x in given if x in arrays)

    def call(h, function, **more):
        moved = {x: y + h * dots[x] for x, y in given.items()}
        own = options_of(name, mask_mod=causal, softcap=3.0)
        own["mod_arrays"] = arrays | {x: moved.pop(x) for x in names}
        return function(**moved, **own, **more)

    def gradients(h):
        return call(h, attention_vjp, dout=dout, return_dmod=names)

    out, lse = call(0, attention)
    got = call(
        0, double_backward, dout=dout, out=out, lse=lse, return_dmod=names,
        **{f"dd{x}": dots[x] for x in ("q", "k", "v", "bias")},
        ddmods={x: dots[x] for x in names}, **TILES,
    )  # fmt: skip
    pairs = zip(gradients(1e-5), gradients(-1e-5), strict=True)
    *want, (ahead, behind) = pairs
    found = got.d2q, got.d2k, got.d2v, got.d2bias
    for x, (a, b) in zip(found, want, strict=True):
        assert_allclose(x, (a - b) / 2e-5, "second", atol=1e-7)
    for x in names:
        difference = (ahead[x] - behind[x]) / 2e-5
        assert_allclose(got.d2mod[x], difference, x, atol=1e-7)


FUNCTIONS = (
    lambda x, b, h, i, j, *, a: np.exp(x * a[j]) / (1.5 + a[i] * a[j]),
    lambda x, b, h, i, j, *, a: np.log1p(x * x) * np.sin(a[j]) - x / a[i],
    lambda x, b, h, i, j, *, a: np.maximum(x, a[j]) ** 2 + abs(x - a[i]),
    lambda x, b, h, i, j, *, a: (2 + np.cos(x)) ** (a[j] * a[j] + x * x),
    lambda x, b, h, i, j, *, a: np.sqrt(4 + x * a[j]) % 1.5 + np.exp2(-x * x),
    lambda x, b, h, i, j, *, a: np.where(
        j > i, np.sqrt((j > i) * (1 + x * x)), np.tanh(x) * np.expm1(a[j])
    ),
)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_slopes_move(function):
    """`moving` is the difference of `score`."""
    rng = np.random.default_rng(3)
    s, s_dot = rng.uniform(-1, 1, (2, 4, 5))
    a, a_dot = rng.uniform(0.3, 1, (2, 5))
    place = Place(np.arange(4), np.arange(5), 4, 5, HeadIndices())
    found = expressions.moving(
        function, s, place, {"a": a}, s_dot, {"a": a_dot}, ("a",)
    )
    ahead, behind = (
        expressions.score(
            function, s + h * s_dot, place, {"a": a + h * a_dot}, ("a",)
        )
        for h in (1e-6, -1e-6)
    )
    assert_allclose(found.w, (ahead.s - behind.s) / 2e-6, "w", atol=1e-8)
    difference = (ahead.slope - behind.slope) / 2e-6
    assert_allclose(found.slope + 0 * s, difference + 0 * s, "slope",
                    atol=1e-8)  # fmt: skip
    of_a = [found.gathers.get(x, 0.0) for x in found.gathers]
    want = [
        (x - y) / 2e-6
        for x, y in zip(ahead.gathers.values(), behind.gathers.values(),
                        strict=True)
    ]  # fmt: skip
    assert_allclose(sum(of_a) + 0 * s, sum(want) + 0 * s, "f_a", atol=1e-8)


def branching(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


@pytest.mark.parametrize(
    "function, message",
    [
        (branching, "write np.where"),
        (lambda x, b, h, i, j: np.sum(x), "np.sum of a whole tile"),
        (lambda x, b, h, i, j: np.add.reduce(x), "np.add of a whole tile"),
        (lambda x, b, h, i, j: np.arcsin(x), "np.arcsin has no derivative"),
        (lambda x, b, h, i, j: x + TOKENS, "ndarray is no number"),
        (lambda x, b, h, i, j: None, "NoneType is no number"),
        (lambda x, b, h, i, j: i > j, "bool, which is no score"),
    ],
)
def test_functions_that_are_no_scores(function, message):
    q, k, v, _ = inputs()
    with pytest.raises(TypeError, match=message):
        attention(q, k, v, score_mod=function, **HEADS)


def test_a_mask_is_bool():
    place = Place(np.arange(2), np.arange(3), 2, 3, HeadIndices())
    with pytest.raises(TypeError, match="mask_mod returned int64, not bool"):
        expressions.visible(lambda b, h, i, j: i - j, place, {})
