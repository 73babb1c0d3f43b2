"""layers.rotary against the rotation of each pair, one by one."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import int32, normal, offsets  # noqa: E402
from flash_attn_oracle import UNIT, rotated  # noqa: E402
from torch.autograd.functional import jacobian  # noqa: E402

from cuflash.flash_attn.layers.rotary import (  # noqa: E402
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from cuflash.flash_attn.ops.triton.rotary import apply_rotary  # noqa: E402
from helpers.compare import assert_arrays_equal, assert_at_most  # noqa: E402

pytestmark = pytest.mark.slow

ROWS, SEQLEN, PAIRS = 12, 5, 3
COS, SIN = (f(normal(ROWS, PAIRS)) for f in (torch.cos, torch.sin))
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True])
# Of numbers below 6: two products and their sum, each rounded once, twice.
TOLERANCE = 2 * 3 * 12 * UNIT


def tokens(*more, grad=False):
    return normal(2, SEQLEN, *more, 3, 8, grad=grad)


def expect(x, first=(0, 0), interleaved=False):
    pairs = zip(x, first, strict=True)
    return torch.stack(
        [rotated(s, COS, SIN, n, interleaved) for s, n in pairs]
    )


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@INTERLEAVED
@pytest.mark.parametrize("first", [(0, 0), (4, 4), (7, 2)])
def test_positions(first, interleaved):
    x = tokens()
    given = first[0] if len({*first}) == 1 else int32(*first)
    got = apply_rotary_emb(x, COS, SIN, interleaved, seqlen_offsets=given)
    assert_close(got, expect(x, first, interleaved))
    assert_arrays_equal(x, tokens(), "x")


@INTERLEAVED
def test_packed_sequences(interleaved):
    x, first = normal(9, 3, 8), (2, 0, 5)
    got = apply_rotary_emb(
        x, COS, SIN, interleaved, seqlen_offsets=int32(*first),
        cu_seqlens=offsets([4, 0, 5]), max_seqlen=5,
    )  # fmt: skip
    assert_close(got[:4], rotated(x[:4], COS, SIN, 2, interleaved))
    assert_close(got[4:], rotated(x[4:], COS, SIN, 5, interleaved))


def test_in_place():
    x = tokens()
    assert apply_rotary_emb_func(x, COS, SIN, inplace=True) is x
    assert_close(x, expect(tokens()))


@INTERLEAVED
@pytest.mark.parametrize("first", [2, int32(1, 3)])
def test_gradients(first, interleaved):
    def run(x):
        return apply_rotary_emb(x, COS, SIN, interleaved, seqlen_offsets=first)

    x = tokens(grad=True)
    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


def test_gradients_in_place():
    def run(qkv):
        return apply_rotary_emb_qkv_(qkv.clone(), COS, SIN)

    assert torch.autograd.gradcheck(run, (tokens(3, grad=True),))


def test_arithmetic_of_16_bits_is_float32():
    """One rounding of the result; that of float32 fits in one ulp."""
    x = tokens().bfloat16()
    got = apply_rotary_emb(x, COS.float(), SIN.float())
    want = expect(x)
    ulp = torch.finfo(torch.bfloat16).eps * want.abs().max()
    assert got.dtype == torch.bfloat16
    assert_at_most((got.double() - want).abs(), ulp, "want")


def test_tokens_past_the_tables_are_not_rotated():
    x = tokens()
    got = apply_rotary_emb(x, COS, SIN, seqlen_offsets=int32(ROWS, ROWS - 2))
    assert_arrays_equal(got[0], x[0], "got[0]")
    assert_arrays_equal(got[1, 2:], x[1, 2:], "got[1, 2:]")
    assert_close(got[1, :2], rotated(x[1, :2], COS, SIN, ROWS - 2, False))


def test_queries_and_keys_in_one_tensor():
    qkv = tokens(3)
    assert apply_rotary_emb_qkv_(qkv, COS, SIN, seqlen_offsets=1) is qkv
    before = tokens(3)
    for i in (0, 1):
        assert_close(qkv[:, :, i], expect(before[:, :, i], (1, 1)))
    assert_arrays_equal(qkv[:, :, 2], before[:, :, 2], "qkv[:, :, 2]")


def test_queries_and_keys_as_heads():
    qkv = normal(2, SEQLEN, 4 + 2 * 2, 8)
    before = qkv.clone()
    apply_rotary_emb_qkv_(qkv, COS, SIN, interleaved=True, num_heads_q=4)
    assert_close(qkv[:, :, :6], expect(before[:, :, :6], interleaved=True))
    assert_arrays_equal(qkv[:, :, 6:], before[:, :, 6:], "qkv[:, :, 6:]")


def test_other_tables_of_keys():
    qkv, before = tokens(3), tokens(3)
    apply_rotary_emb_qkv_(qkv, COS, SIN, SIN, COS)
    assert_close(qkv[:, :, 0], expect(before[:, :, 0]))
    want = apply_rotary_emb(before[:, :, 1], SIN, COS)
    assert_arrays_equal(qkv[:, :, 1], want, "qkv[:, :, 1]")


def test_keys_and_values_in_one_tensor():
    kv, before = tokens(2), tokens(2)
    assert apply_rotary_emb_kv_(kv, COS, SIN) is kv
    assert_close(kv[:, :, 0], expect(before[:, :, 0]))
    assert_arrays_equal(kv[:, :, 1], before[:, :, 1], "kv[:, :, 1]")


def test_conjugate_rotates_back():
    x = tokens()
    turned = apply_rotary(x, COS, SIN, seqlen_offsets=2)
    assert_close(apply_rotary(turned, COS, SIN, 2, conjugate=True), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_makes_its_tables(dtype):
    """Angles position * base ** (-2 i / dim), rounded to the dtype.

    Anew for each dtype, and for more tokens.
    """
    module = RotaryEmbedding(6, base=100.0).to(dtype)
    module(tokens(3).to(dtype))  # tables of fewer tokens
    module(tokens(3).bfloat16(), seqlen_offset=2)  # of another dtype
    qkv = tokens(3).to(dtype)
    want = tokens(3).to(dtype)
    frequencies = 100.0 ** (-torch.arange(0, 6, 2) / 6)
    angles = torch.outer(torch.arange(SEQLEN + 2.0), frequencies)
    tables = (f(angles).to(dtype) for f in (torch.cos, torch.sin))
    apply_rotary_emb_qkv_(want, *tables, seqlen_offsets=2)
    got = module(qkv, seqlen_offset=2)
    eps = torch.finfo(dtype).eps  # frequencies may differ in their last bit
    torch.testing.assert_close(got, want, rtol=0, atol=8 * eps)


def test_the_module_with_keys_and_values_apart():
    module = RotaryEmbedding(8, interleaved=True)
    q, kv, qkv = tokens(), tokens(2), torch.cat([tokens(1), tokens(2)], 2)
    want = module(qkv)
    got_q, got_kv = module(q, kv, max_seqlen=9, seqlen_offset=int32(0, 0))
    assert_arrays_equal(got_q, want[:, :, 0], "got_q")
    assert_arrays_equal(got_kv, want[:, :, 1:], "got_kv")


def test_scaled_tables_keep_scores_of_one_position():
    """xPos multiplies queries by what it divides keys by."""
    q, kv = tokens(), tokens(2)
    scores = (q * kv[:, :, 0]).sum(-1)
    got_q, got_kv = RotaryEmbedding(8, scale_base=16.0)(q, kv)
    got = (got_q * got_kv[:, :, 0]).sum(-1)
    # Tables are made in float32: 8 terms of two factors each.
    atol = 16 * torch.finfo(torch.float32).eps * 36
    torch.testing.assert_close(got, scores, rtol=0, atol=atol)


# Transforms of torch.func ------------------------------------------------


def of_x(x):
    return apply_rotary_emb(x, COS, SIN, seqlen_offsets=int32(1, 3))


def of_qkv(qkv):
    return apply_rotary_emb_qkv_(qkv.clone(), COS, SIN, seqlen_offsets=2)


TRANSFORMS = {
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "vectorize": lambda f: lambda x: jacobian(f, x, vectorize=True),
    "forward mode": lambda f: (
        lambda x: jacobian(f, x, vectorize=True, strategy="forward-mode")
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of forward mode
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("function", [of_x, of_qkv])
def test_transforms(function, name):
    x = tokens(*([3] if function is of_qkv else []))[..., :1, :]
    assert_close(TRANSFORMS[name](function)(x), jacobian(function, x))


@pytest.mark.parametrize("mapped", ["x", "tables"])
def test_vmap(mapped):
    x = torch.stack([tokens(), 2 * tokens()])
    cos, sin = torch.stack([COS, SIN]), torch.stack([SIN, COS])
    dims = (0, None, None) if mapped == "x" else (None, 0, 0)
    given = (x, COS, SIN) if mapped == "x" else (x[0], cos, sin)
    got = torch.func.vmap(apply_rotary_emb, dims)(*given)
    each = [
        apply_rotary_emb(*(y if d is None else y[i] for y, d in pairs))
        for i, pairs in enumerate([[*zip(given, dims, strict=True)]] * 2)
    ]
    assert_close(got, torch.stack(each))


def test_in_place_in_a_transform():
    def loss(x):
        rotated = apply_rotary_emb(x.clone(), COS, SIN, inplace=True)
        return rotated.square().sum()

    # A rotation keeps lengths.
    assert_close(torch.func.grad(loss)(tokens()), 2 * tokens())
