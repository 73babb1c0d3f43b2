"""Arrays of (batch, seqlen, heads, head_dim) are refused, not misread."""

import numpy as np
import pytest

from cuflash.reference import attention, backward, forward
from helpers.compare import assert_allclose

RNG = np.random.default_rng(0)
FORWARD = [
    attention.attention,
    forward.row_by_row,
    forward.query_outer,
    forward.key_outer,
    forward.split_keys,
]
BACKWARD = [
    backward.row_by_row,
    backward.query_outer,
    backward.key_outer,
    backward.two_pass,
]


@pytest.mark.parametrize("schedule", FORWARD)
@pytest.mark.parametrize("shape", [(5, 2, 4), (1, 5, 2, 4)])
def test_forward_refuses_what_may_have_tokens_first(schedule, shape):
    q, k, v = RNG.standard_normal((3, *shape))
    with pytest.raises(ValueError, match=r"pass heads_first=True if") as error:
        schedule(q, k, v)
    assert str(shape) in str(error.value)
    out, lse = schedule(q, k, v, heads_first=True)
    assert (out.shape, lse.shape) == (shape, shape[:-1])


@pytest.mark.parametrize("schedule", BACKWARD)
def test_backward_refuses_it_too(schedule):
    q, k, v, dout = RNG.standard_normal((4, 2, 5, 4))
    out, lse = attention.attention(q, k, v, heads_first=True)
    operands = dout, q, k, v, out, lse
    with pytest.raises(ValueError, match="heads_first"):
        schedule(*operands)
    assert schedule(*operands, heads_first=True)[0].shape == q.shape


def test_gradient_steps_refuse_it_too():
    q, k, v, dout = RNG.standard_normal((4, 2, 5, 4))
    with pytest.raises(ValueError, match=r"taken for \(heads, seqlen"):
        attention.gradient_steps(dout, q, k, v)


@pytest.mark.parametrize("lead", [(), (1, 2, 3)])
def test_one_head_and_five_axes_need_no_word(lead):
    q, k, v = RNG.standard_normal((3, *lead, 5, 4))
    assert attention.attention(q, k, v)[0].shape == q.shape


def test_the_way_that_the_message_shows_is_right():
    q, k, v = RNG.standard_normal((3, 1, 5, 2, 4))
    heads = (np.swapaxes(x, -2, -3) for x in (q, k, v))
    out, _ = attention.attention(*heads, heads_first=True)
    alone, _ = attention.attention(q[0, :, 1], k[0, :, 1], v[0, :, 1])
    assert_allclose(out[0, 1], alone, "out[0, 1]", rtol=1e-13)
