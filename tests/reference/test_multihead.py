"""The layer around attention: projections, heads, and their gradients."""

import numpy as np
import pytest

from cuflash.reference import multihead
from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.multihead import GradientRow, Weights
from helpers.compare import assert_allclose, assert_arrays_equal
from helpers.reference_cases import EPS, ReferenceCase, assert_close, bounds

WIDTH, WIDTH_OUT, HEAD_DIM, HEAD_DIM_V, SEQLEN = 5, 4, 3, 2, 6
GRADIENTS = ["dx", "dw_q", "dw_k", "dw_v", "dw_o"]

# num_heads, num_heads_kv, scale, causal
LAYERS = pytest.mark.parametrize(
    "heads",
    [(1, 1, None, False), (4, 4, None, True), (4, 2, 0.3, False),
     (4, 1, None, True)],
    ids=str,
)  # fmt: skip


def keywords(heads):
    names = ("num_heads", "num_heads_kv", "scale", "causal")
    return dict(zip(names, heads, strict=True))


def layer(heads, lead=()):
    """Return x, weights and dy, standard normal."""
    rng = np.random.default_rng(0)
    num_heads, num_heads_kv, _, _ = heads
    weights = Weights(
        rng.standard_normal((WIDTH, num_heads * HEAD_DIM)),
        rng.standard_normal((WIDTH, num_heads_kv * HEAD_DIM)),
        rng.standard_normal((WIDTH, num_heads_kv * HEAD_DIM_V)),
        rng.standard_normal((num_heads * HEAD_DIM_V, WIDTH_OUT)),
    )
    x = rng.standard_normal((*lead, SEQLEN, WIDTH))
    return x, weights, rng.standard_normal((*lead, SEQLEN, WIDTH_OUT))


def largest(array):
    return abs(array).max()


def layer_error(heads, x, w):
    """Bound the difference of two float64 evaluations of the layer.

    Q, K and V are sums of WIDTH products, so their errors are WIDTH EPS of
    their absolute sums; scores carry that of Q and of K, HEAD_DIM more of
    their own and 8 for scaling and the maximum. P has the exponential of
    it in numerator and denominator, with SEQLEN additions, rescalings and
    products and 8 more. Y is a sum of num_heads * HEAD_DIM_V products of
    out, which is at most |V|, and W_O.
    """
    q, k, v = (abs(x) @ abs(m) for m in (w.w_q, w.w_k, w.w_v))
    scale = HEAD_DIM**-0.5 if heads[2] is None else heads[2]
    s = scale * HEAD_DIM * largest(q) * largest(k)
    rel = 2 * (2 * WIDTH + HEAD_DIM + 8) * s + 3 * SEQLEN + 8 + WIDTH
    terms = len(w.w_o)
    return 2 * EPS * (rel + terms) * terms * largest(v) * largest(w.w_o)


def columns(w, head, size):
    return w[:, head * size : (head + 1) * size]


@LAYERS
def test_layer_is_attention_head_by_head(heads):
    x, w, _ = layer(heads)
    num_heads, num_heads_kv, scale, causal = heads
    expected = np.zeros((SEQLEN, WIDTH_OUT))
    for h in range(num_heads):
        kv = h // (num_heads // num_heads_kv)
        q = x @ columns(w.w_q, h, HEAD_DIM)
        k = x @ columns(w.w_k, kv, HEAD_DIM)
        v = x @ columns(w.w_v, kv, HEAD_DIM_V)
        out, _ = attention(q, k, v, scale=scale, causal=causal)
        expected += out @ columns(w.w_o.T, h, HEAD_DIM_V).T
    got = multihead.multi_head_attention(x, w, **keywords(heads))
    assert_close(got, expected, layer_error(heads, x, w))


def loss(operands, dy, heads):
    x, *weights = operands
    y = multihead.multi_head_attention(x, Weights(*weights), **keywords(heads))
    return (dy * y).sum()


@LAYERS
@pytest.mark.parametrize("which", range(5), ids=GRADIENTS)
def test_gradient_is_the_finite_difference(which, heads):
    x, weights, dy = layer(heads, lead=(2,))
    operands = [x, *weights]
    rng = np.random.default_rng(which)
    direction = rng.standard_normal(operands[which].shape)
    direction /= np.linalg.norm(direction)

    def slope(h):
        ahead, behind = list(operands), list(operands)
        ahead[which] = operands[which] + h * direction
        behind[which] = operands[which] - h * direction
        return (loss(ahead, dy, heads) - loss(behind, dy, heads)) / (2 * h)

    h = 1e-4
    once, twice = slope(h), slope(2 * h)
    # slope(h) is off by h^2 f'''/6 + O(h^4), a third of slope(2h) -
    # slope(h), and by the rounding of two losses over 2 h.
    rounding = layer_error(heads, x, weights) + dy.size * EPS
    atol = abs(twice - once) + rounding * abs(dy).sum() / h
    gradients = multihead.multi_head_attention_vjp(
        dy, x, weights, **keywords(heads)
    )
    got = (gradients[which] * direction).sum()
    assert_allclose(got, once, "got", atol=atol)


def test_worked_example_after_one_step_of_descent():
    # 002, with X = W_O = I, at 0.1: two decimals, half a unit of the last.
    w = Weights(
        np.array([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]),
        np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]),
        np.arange(1.0, 17).reshape(4, 4),
        np.eye(4),
    )
    dy = np.array([[1.0] * 4, [0] * 4, [1] * 4, [0] * 4])
    gradients = multihead.multi_head_attention_vjp(
        dy, np.eye(4), w, num_heads=1, scale=1
    )
    steps = zip(w, gradients[1:], strict=True)
    w_q, w_k, w_v, _ = (m - 0.1 * dm for m, dm in steps)
    for got, expected in (
        (w_v[0], [0.94, 1.94, 2.94, 3.94]),
        (w_q[0], [1.12, -0.12, 0.56, -0.19]),
        (w_k[0], [2.30, 0, 0.56, 0]),
    ):
        assert_allclose(got, expected, "got", atol=0.005)


# The streamed projections. Integers, so that sums are exact in any order.


def integer_rows(rng):
    """Return x, (w_q, w_k, w_v) and (dq, dk, dv)."""
    x = rng.integers(-9, 10, (SEQLEN, WIDTH)).astype(float)
    widths = (4, 3, 2)
    weights = [rng.integers(-9, 10, (WIDTH, n)) for n in widths]
    gradients = [rng.integers(-9, 10, (SEQLEN, n)) for n in widths]
    return x, weights, [g.astype(float) for g in gradients]


def rows_of(gradients):
    return [
        GradientRow(of, token, row)
        for of, gradient in zip("qkv", gradients, strict=True)
        for token, row in enumerate(gradient)
    ]


def plain_projection_vjp(gradients, x, weights):
    dxs, dws = zip(
        *(
            multihead.project_vjp(dy, x, w)
            for dy, w in zip(gradients, weights, strict=True)
        ),
        strict=True,
    )
    return sum(dxs), *dws


def assert_streamed_is_plain(rows, gradients, x, weights):
    got = multihead.streamed_projection_vjp(rows, x, *weights)
    expected = plain_projection_vjp(gradients, x, weights)
    for a, b in zip(got, expected, strict=True):
        assert_arrays_equal(a, b, "a")


def test_streamed_projections_in_any_order():
    rng = np.random.default_rng(0)
    x, weights, gradients = integer_rows(rng)
    rows = rows_of(gradients)
    shuffled = (rows[i] for i in rng.permutation(len(rows)))
    assert_streamed_is_plain(shuffled, gradients, x, weights)


def test_streamed_projections_of_rows_in_parts():
    x, weights, gradients = integer_rows(np.random.default_rng(1))
    halves = [row._replace(row=row.row / 2) for row in rows_of(gradients)]
    assert_streamed_is_plain(halves + halves, gradients, x, weights)


def test_streamed_projections_keep_no_row():
    x, weights, gradients = integer_rows(np.random.default_rng(2))

    def spoilt_after_use():
        for of, token, row in rows_of(gradients):
            buffer = row.copy()
            yield GradientRow(of, token, buffer)
            buffer[:] = np.nan

    assert_streamed_is_plain(spoilt_after_use(), gradients, x, weights)


def heads_and_dout(heads):
    """Return dout, q, k, v of every query head."""
    num_heads, num_heads_kv, _, _ = heads
    x, weights, dy = layer(heads)
    dout = multihead.split_heads(dy @ weights.w_o.T, num_heads)
    return dout, *multihead.heads_of(x, weights, num_heads, num_heads_kv)


def rows_by_column(heads):
    num_heads, num_heads_kv, scale, causal = heads
    return multihead.gradient_rows(
        *heads_and_dout(heads),
        group_size=num_heads // num_heads_kv,
        scale=scale,
        causal=causal,
    )


def rows_error(heads):
    """Bound the differences of rows of dq, dk and dv.

    bounds() counts seqlen_q additions for dk and dv; the group's are fewer
    than that, and its heads' differences add up.
    """
    dout, q, k, v = heads_and_dout(heads)
    b = bounds(ReferenceCase(scale=heads[2]), q, k, v, dout)
    group = heads[0] // heads[1]
    return {"q": b.dq, "k": 2 * group * b.dk, "v": 2 * group * b.dv}


def test_infinite_input_warns_of_nothing():
    x, weights, dy = layer(heads := (1, 1, None, False))
    x[0] = np.inf
    y = multihead.multi_head_attention(x, weights, **keywords(heads))
    gradients = multihead.multi_head_attention_vjp(
        dy, x, weights, **keywords(heads)
    )
    assert np.isnan(y).any() and np.isnan(gradients.dx).any()


@LAYERS
def test_gradient_rows_are_those_of_the_vjp(heads):
    num_heads, num_heads_kv, scale, causal = heads
    dq, dk, dv = attention_vjp(
        *heads_and_dout(heads),
        scale=scale,
        causal=causal,
        heads_first=True,
    )
    group = num_heads // num_heads_kv
    dk, dv = (multihead.share_heads_vjp(d, group) for d in (dk, dv))
    expected = rows_of(multihead.join_heads(d) for d in (dq, dk, dv))
    got = sorted(rows_by_column(heads), key=lambda row: row[:2])
    got.sort(key=lambda row: "qkv".index(row.of))
    error = rows_error(heads)
    for a, b in zip(got, expected, strict=True):
        assert a[:2] == b[:2]
        assert_close(a.row, b.row, error[a.of])


@LAYERS
def test_streamed_layer_is_the_plain_one(heads):
    x, weights, dy = layer(heads)
    got = multihead.streamed_projection_vjp(
        rows_by_column(heads), x, *weights[:3]
    )
    plain = multihead.multi_head_attention_vjp(
        dy, x, weights, **keywords(heads)
    )
    # Sums of at most 3 * 12 products with W, and of SEQLEN with X. Their
    # own rounding, 2 * 36 EPS of the largest row, is the smaller part of
    # rows_error, where P alone brings 2 * 3 * SEQLEN: hence 3 times.
    errors = [3 * error for error in rows_error(heads).values()]
    dx = sum(
        w.shape[1] * largest(w) * error
        for w, error in zip(weights[:3], errors, strict=True)
    )
    dws = [SEQLEN * largest(x) * error for error in errors]
    for a, b, error in zip(got, plain[:4], [dx, *dws], strict=True):
        assert_close(a, b, error)


@LAYERS
def test_folded_projections_of_all_heads_are_dx(heads):
    num_heads, num_heads_kv, scale, causal = heads
    x, weights, dy = layer(heads)
    douts = heads_and_dout(heads)[0]
    got = np.zeros(x.shape)
    for h in range(num_heads):
        kv = h // (num_heads // num_heads_kv)
        w_q = columns(weights.w_q, h, HEAD_DIM)
        w_k = columns(weights.w_k, kv, HEAD_DIM)
        w_v = columns(weights.w_v, kv, HEAD_DIM_V)
        got += multihead.folded_projection_vjp(
            douts[h], x, w_q, w_k, w_v, scale=scale, causal=causal
        )
    plain = multihead.multi_head_attention_vjp(
        dy, x, weights, **keywords(heads)
    )
    # As for the streamed layer: rows' errors, times W.
    dx = sum(
        3 * w.shape[1] * largest(w) * error
        for w, error in zip(
            weights[:3], rows_error(heads).values(), strict=True
        )
    )
    assert_close(got, plain.dx, dx)


def test_folded_projections_of_the_worked_example():
    # [002] with X = I: W_Q is Q, and dX is dQ Q^T + dK K^T + dV V^T.
    q = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
    k = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]])
    v, dout = np.arange(1.0, 17).reshape(4, 4), np.zeros((4, 4))
    dout[[0, 2]] = 1
    got = multihead.folded_projection_vjp(dout, np.eye(4), q, k, v, scale=1)
    dq, dk, dv = attention_vjp(dout, q, k, v, scale=1)
    expected = dq @ q.T + dk @ k.T + dv @ v.T
    # [002]'s numbers are below 60 and its sums have at most 12 terms.
    assert_allclose(got, expected, "got", atol=12 * 12 * 60 * EPS)
    # In [002]'s own numbers: three of two decimals, ten times one of three.
    document = (-1.19 + 4.38) - 12.99 + 0.590 * (1 + 2 + 3 + 4)
    assert abs(got[0, 0] - document) <= 3 * 0.005 + 10 * 0.0005


def test_projection_gradient_sums_over_the_batch():
    rng = np.random.default_rng(3)
    x, dy = rng.integers(-9, 10, (2, 3, SEQLEN, WIDTH))
    w = rng.integers(-9, 10, (WIDTH, WIDTH))
    dx, dw = multihead.project_vjp(dy, x, w)
    assert_arrays_equal(dx[1], dy[1] @ w.T, "dx[1]")
    assert_arrays_equal(dw, sum(x[b].T @ dy[b] for b in range(3)), "dw")


def test_split_heads_puts_a_heads_columns_together():
    y = np.arange(6.0).reshape(1, 6)
    heads = multihead.split_heads(y, 3)
    assert_arrays_equal(heads[:, 0], [[0, 1], [2, 3], [4, 5]], "heads[:, 0]")
    assert_arrays_equal(multihead.join_heads(heads), y, "heads")


def test_group_reads_its_own_key_head():
    heads = np.arange(2.0).reshape(2, 1, 1)
    shared = multihead.share_heads(heads, 3)
    assert_arrays_equal(shared.ravel(), [0, 0, 0, 1, 1, 1], "shared.ravel()")
    back = multihead.share_heads_vjp(shared, 3)
    assert_arrays_equal(back.ravel(), [0, 3], "back.ravel()")
