"""qv of FlashAttention-3: scores are Q K^T + Qv V^T."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import assert_close, int32, normal, offsets  # noqa: E402
from flash_attn_oracle import sequence, tolerance  # noqa: E402
from torch_data import assert_equal  # noqa: E402

from cuflash.errors import (  # noqa: E402
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from cuflash.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.slow

D, DV, LENGTHS, NEW = 8, 24, (3, 7), 2


def made(tokens, new=NEW):
    """q, qv of new tokens; rows of values and then keys."""
    q, qv = normal(2, new, 4, D), normal(2, new, 4, DV, seed=1)
    return q, qv, normal(2, tokens, 2, DV + D, seed=2)


def check(got, q, qv, rows, **options):
    """Against the oracle, with queries and keys of all columns."""
    queries = torch.cat([qv, q], -1)
    want = [
        sequence(x, y, y[..., :DV], **options)[0]
        for x, y in zip(queries, rows, strict=True)
    ]
    assert_close(got, torch.stack(want), tolerance(queries, rows, rows))


def test_dense():
    q, qv, rows = made(9)
    v, k = rows.split((DV, D), -1)
    got = flash_attn_func(q, k, v, causal=True, qv=qv)
    check(got, q, qv, rows, causal=True)


def test_packed():
    q, qv, rows = made(9)
    v, k = rows.flatten(0, 1).split((DV, D), -1)
    at = offsets((NEW, NEW)), offsets((9, 9)), NEW, 9
    got = flash_attn_varlen_func(
        q.flatten(0, 1), k, v, *at, qv=qv.flatten(0, 1)
    )
    check(got.view(2, NEW, 4, DV), q, qv, rows)


@pytest.mark.parametrize("in_one", [True, False])
def test_caches(in_one):
    """In place if a row holds a value and then its key, else by a copy."""
    q, qv, rows = made(12)
    new = normal(2, NEW, 2, DV + D, seed=5)
    v, k = rows.clone().split((DV, D), -1)
    if not in_one:
        v, k = v.clone(), k.clone()
    v_new, k_new = new.split((DV, D), -1)
    got = flash_attn_with_kvcache(
        q, k, v, k_new, v_new, cache_seqlens=int32(*LENGTHS), causal=True,
        qv=qv,
    )  # fmt: skip
    for b, n in enumerate(LENGTHS):
        rows[b, n : n + NEW] = new[b]
        assert_equal(k[b], rows[b][..., DV:])
        one = slice(b, b + 1)
        check(got[one], q[one], qv[one], rows[one, : n + NEW], causal=True)


def test_rotation_of_both():
    q, qv, rows = made(12)
    v, k = rows.split((DV, D), -1)
    cos = torch.ones(12, 2)
    with pytest.raises(UnsupportedError, match="rotary_cos is given with qv"):
        flash_attn_with_kvcache(
            q, k, v, k[:, :2], v[:, :2], cos, cos, 3, qv=qv
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, qv: (q, qv[..., :-1]), ShapeError, "qv has shape"),
        (lambda q, qv: (q, qv[:, :, :2]), ShapeError, "qv has shape"),
        (lambda q, qv: (q, qv.half()), DTypeError, "qv has dtype"),
    ],
)
def test_a_wrong_qv_leaves_the_caches(change, error, message):
    q, qv, rows = made(12)
    v, k = (x.clone() for x in rows.split((DV, D), -1))
    before = k.clone(), v.clone()
    new = normal(2, NEW, 2, DV + D, seed=5)
    v_new, k_new = new.split((DV, D), -1)
    q, qv = change(q, qv)
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(
            q, k, v, k_new, v_new, cache_seqlens=int32(*LENGTHS), qv=qv
        )
    assert_equal(k, before[0])
    assert_equal(v, before[1])
