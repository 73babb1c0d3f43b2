"""A user's score and mask on the path of CUDA tensors, on an emulated device.

With the same functions, arrays and kernels as calls on NumPy arrays.
"""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import assert_equal, on_numpy  # noqa: E402

import cuflash  # noqa: E402
from cuflash.torch import (  # noqa: E402
    attention,
    create_block_mask,
    flex_attention,
)
from cuflash.torch.dtypes import from_numpy  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.compare import assert_allclose  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]

SEQLEN = 65
TABLE = torch.cos(torch.arange(2 * 2 * SEQLEN) * 1.0).reshape(2, -1)
IDS = torch.arange(SEQLEN) // 20


def relative(score, b, h, q_idx, kv_idx, *, table, rate):
    return score + rate * table[h, q_idx - kv_idx + SEQLEN]


def documents(b, h, q_idx, kv_idx, *, ids):
    return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def test_as_numpy_arrays():
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, SEQLEN, 2, 16, generator=generator)
    arrays = {"table": TABLE, "ids": IDS, "rate": 0.5}
    given = {"score_mod": relative, "mask_mod": documents}
    table = TABLE.clone().requires_grad_()
    own = {"table": table, "ids": IDS, "rate": 0.5}
    with emulated_torch.active("sm_80") as device:
        out = attention(q, k, v, **given, mod_arrays=own)
        (gradient,) = torch.autograd.grad(out, table, dout)
        assert any("backward" in x for x, _ in device.launches)
        on_host = {n: getattr(x, "numpy", lambda x=x: x)()
                   for n, x in arrays.items()}  # fmt: skip
        given |= {"mod_arrays": on_host}
        expected, lse = on_numpy(
            cuflash.forward, q, k, v, return_lse=True, **given
        )
        *_, dmod = cuflash.backward(
            *(x.detach().numpy() for x in (dout, q, k, v, expected, lse)),
            **given, return_dmod=("table",),
        )  # fmt: skip
    assert_equal([out.detach()], [expected])
    # Both add in the order of the emulator's blocks.
    assert_equal([gradient], [from_numpy(dmod["table"])])


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of forward mode
def test_derivatives_as_on_the_cpu():
    generator = torch.Generator().manual_seed(0)
    q, k, v, moved = torch.randn(4, 1, 20, 2, 16, generator=generator)
    table = TABLE.clone().requires_grad_()

    def call(q, table):
        def score(s, b, h, i, j):
            return torch.tanh(s) * table[h, i - j + SEQLEN]

        return attention(q, k, v, score_mod=score)

    def results():
        given, towards = (q, table.detach()), (moved, TABLE.flip(1))
        _, tangent = torch.func.jvp(call, given, towards)
        (first,) = torch.autograd.grad(
            call(q, table).square().sum(), table, create_graph=True
        )
        return tangent, *torch.autograd.grad(first.square().sum(), table)

    expected = results()
    with emulated_torch.active("sm_80") as device:
        got = results()
    words = " ".join(x for x, _ in device.launches)
    assert "jvp" in words and "double_backward" in words
    for x, y in zip(got, expected, strict=True):
        # float32 sums of 2^9 terms: 2^-24 of 2^9 of the largest.
        atol = 2.0**-15 * float(y.abs().max())
        assert_allclose(x.numpy(), y.numpy(), "result", atol=atol)


def test_calls_with_one_block_mask_find_its_tiles_once():
    """Until what it reads has changed."""
    ids = IDS.clone()
    mask = create_block_mask(
        lambda b, h, i, j: ids[i] == ids[j], None, None, SEQLEN, SEQLEN
    )
    query, key, value = torch.randn(3, 1, 2, SEQLEN, 16)
    flags = []
    with emulated_torch.active("sm_80") as device:
        for step in range(4):
            before = len(device.launches)
            got = flex_attention(query, key, value, block_mask=mask)
            entries = [x for x, _ in device.launches[before:]]
            flags.append(any("tile_flags" in x for x in entries))
            scores = query @ key.mT / 4
            hidden = ids[:, None] != ids
            weights = scores.masked_fill(hidden, -float("inf")).softmax(-1)
            expected = (weights @ value).numpy()
            # float32 sums of 2^6 terms of size 2^2.
            assert_allclose(got.numpy(), expected, "out", atol=2.0**-16)
            if step == 1:
                ids[40:] = 7
    assert flags == [True, False, True, False]
