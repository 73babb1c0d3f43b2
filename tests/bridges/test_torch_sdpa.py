"""`scaled_dot_product_attention` against torch's own, in float64."""

from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from sdpa_data import E, L, S, bounds, inputs, math, normal, results  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers.compare import assert_all, assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

ours = cuflash.torch.scaled_dot_product_attention


def assert_is_torchs(tensors, **options):
    got, want = (results(f, tensors, **options) for f in (ours, math))
    of_out, of_gradients = bounds(*tensors, **options)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape and x.dtype is y.dtype
        limit = of_gradients if i else of_out
        torch.testing.assert_close(x, y, rtol=0, atol=limit)


# Layouts -----------------------------------------------------------------

LEADS = [(), (4,), (2, 4), (3, 2, 4), (2, 1, 2, 4)]


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlens", [(5, 5), (5, 7), (7, 5), (1, 7)])
def test_any_leading_axes_and_alignment(lead, is_causal, seqlens):
    seqlen_q, seqlen_k = seqlens
    tensors = inputs(*lead, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    assert_is_torchs(tensors, is_causal=is_causal)


BROADCAST = {
    "one key head": ((2, 4), (2, 1), (2, 1)),
    "one value head": ((2, 4), (2, 4), (2, 1)),
    "one query head": ((2, 1), (2, 4), (2, 4)),
    "one batch of keys": ((2, 4), (1, 4), (1, 4)),
    "fewer axes": ((2, 4), (4,), ()),
    "two batches": ((3, 1, 4), (1, 2, 4), (4,)),
}


@pytest.mark.parametrize("leads", BROADCAST.values(), ids=BROADCAST)
def test_axes_are_broadcast(leads):
    tensors = [inputs(*lead)[i] for i, lead in enumerate(leads)]
    assert_is_torchs(tensors)


@pytest.mark.parametrize("lead", [(4,), (2, 4), (3, 2, 4)])
def test_grouped_heads(lead):
    assert_is_torchs(
        inputs(*lead, heads_kv=2), enable_gqa=True, is_causal=True
    )


@pytest.mark.parametrize("heads", [(2, 8), (4, 2)])
def test_keys_and_values_grouped_by_themselves(heads):
    of_keys, of_values = heads
    query, key, _ = inputs(2, 8, heads_kv=of_keys)
    value = inputs(2, of_values)[2]
    assert_is_torchs([query, key, value], enable_gqa=True)


@pytest.mark.parametrize("sizes", [(0, 7), (5, 0), (0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_queries_or_keys(sizes, is_causal):
    tensors = inputs(2, 4, seqlen_q=sizes[0], seqlen_k=sizes[1])
    got, want = (
        results(f, tensors, is_causal=is_causal) for f in (ours, math)
    )
    for x, y in zip(got, want, strict=True):
        assert_arrays_equal(x, y, "x")


@pytest.mark.parametrize("lead", [(0, 4), (2, 0), (0, 2, 4)])
def test_no_sequences_or_heads(lead):
    mask = torch.ones(lead[-2:-1] + (1, L, S)) > 0
    for options in ({"is_causal": True}, {"attn_mask": mask}):
        got, want = (
            results(f, inputs(*lead), **options) for f in (ours, math)
        )
        assert [x.shape for x in got] == [x.shape for x in want]


# Masks -------------------------------------------------------------------

SHAPES = [
    (), (S,), (L, 1), (L, S), (1, L, S), (4, 1, S), (1, 1, L, S),
    (2, 1, 1, S), (2, 4, L, S), (2, 1, L, 1),
]  # fmt: skip
MORE_SHAPES = [(L, S), (4, L, S), (2, 1, L, S), (3, 1, 1, L, S)]


def mask_of(shape, kind):
    scores = normal(*shape, seed=4)
    return scores > -0.5 if kind is torch.bool else scores.to(kind)


by_kind = pytest.mark.parametrize(
    "kind", [torch.bool, torch.float64, torch.float32]
)


@by_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_masks(shape, kind):
    assert_is_torchs(inputs(2, 4), attn_mask=mask_of(shape, kind))


@by_kind
@pytest.mark.parametrize("shape", MORE_SHAPES)
def test_masks_of_more_axes(shape, kind):
    assert_is_torchs(inputs(3, 2, 4), attn_mask=mask_of(shape, kind))


@by_kind
@pytest.mark.parametrize("lead", [(), (4,)])
def test_masks_of_fewer_axes(lead, kind):
    mask = mask_of((*lead, L, S), kind)
    assert_is_torchs(inputs(*lead), attn_mask=mask)


@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
@pytest.mark.parametrize("seqlens", [(5, 5), (5, 7)])
def test_causal_biases_of_torch(variant, seqlens):
    from torch.nn.attention import bias

    tensors = inputs(2, 4, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    mask = getattr(bias, f"causal_{variant}")(*seqlens)
    got = ours(*tensors, attn_mask=mask)
    want = math(*tensors, attn_mask=mask._materialize())
    torch.testing.assert_close(got, want, rtol=0, atol=bounds(*tensors)[0])
    with pytest.raises(cuflash.ShapeError, match="a causal bias of "):
        ours(tensors[0][..., 1:, :], *tensors[1:], attn_mask=mask)
    with pytest.raises(cuflash.ValueRangeError, match="both given"):
        ours(*tensors, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_a_row_without_keys_is_zero(kind):
    visible = torch.arange(L) != 2
    mask = visible[:, None].expand(L, S)
    if kind is not torch.bool:
        mask = torch.zeros(L, S, dtype=kind).masked_fill(~mask, -torch.inf)
    assert_is_torchs(inputs(2, 4), attn_mask=mask, scale=0.5)
    out, dq, *_ = results(ours, inputs(2, 4), attn_mask=mask)
    assert_all(out[:, :, 2], 0, "out[:, :, 2]")
    assert_all(dq[:, :, 2], 0, "dq[:, :, 2]")


def test_a_float32_mask_of_16_bit_tensors():
    """It is added to float32 scores; torch's own rounds the sum."""
    tensors = [x.bfloat16() for x in inputs(2, 4)]
    mask = normal(L, S, dtype=torch.float32).requires_grad_()
    out = ours(*tensors, attn_mask=mask)
    tokens_first = (x.transpose(1, 2) for x in tensors)
    want = cuflash.torch.attention(*tokens_first, bias=mask)
    assert_arrays_equal(out, want.transpose(1, 2), "out")
    (dmask,) = torch.autograd.grad(out.sum(), mask)
    assert dmask.dtype is torch.float32 and dmask.shape == (L, S)


# Dropout -----------------------------------------------------------------


def test_dropout_takes_torchs_generator():
    tensors = inputs(2, 4)
    torch.manual_seed(0)
    first, second = (ours(*tensors, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert_arrays_equal(ours(*tensors, dropout_p=0.5), first, "ours")
    assert not torch.equal(first, second)


def test_dropping_all():
    for x in results(ours, inputs(2, 4), dropout_p=1.0):
        assert_all(x, 0, "x")


# Modes -------------------------------------------------------------------


@pytest.mark.parametrize(
    "dynamic, options",
    [
        (False, {"is_causal": True}),
        (True, {"is_causal": True}),
        (True, {"attn_mask": mask_of((L, S), torch.float64)}),
    ],
)
def test_compiled_calls(dynamic, options):
    torch._dynamo.reset()
    compiled = torch.compile(
        ours, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    tensors = inputs(2, 4)
    got, want = (results(f, tensors, **options) for f in (compiled, ours))
    for x, y in zip(got, want, strict=True):
        assert_arrays_equal(x, y, "x")


def test_autocast():
    tensors = [x.float() for x in inputs(2, 4)]
    mask = normal(L, S, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ours(*tensors, attn_mask=mask)
        wide = ours(*inputs(2, 4))
        assert math(*inputs(2, 4)).dtype is wide.dtype is torch.float64
    want = ours(*(x.bfloat16() for x in tensors), attn_mask=mask)
    assert got.dtype is torch.bfloat16
    assert_arrays_equal(got, want, "got")


def test_second_derivatives_and_vmap():
    tensors = inputs(2, 2)
    assert torch.autograd.gradgradcheck(
        ours, [x[:1, :1, :2].requires_grad_() for x in tensors]
    )
    got = torch.func.vmap(ours)(*tensors)
    torch.testing.assert_close(
        got, ours(*tensors), rtol=0, atol=bounds(*tensors)[0]
    )


# Modules of torch --------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Put it in the place of torch's own function, and count its calls."""
    counted = mock.Mock(side_effect=ours)
    name = "scaled_dot_product_attention"
    monkeypatch.setattr(torch.nn.functional, name, counted)
    return counted


@pytest.fixture
def no_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def assert_same_module(module, *tensors, **options):
    """Assert that the module returns what it does by torch's function."""
    got = module(*tensors, **options)
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", math):
        want = module(*tensors, **options)
    # Outputs of a normalised layer, of sums like those of `bounds`.
    limit = bounds(*inputs(2, 4))[1]
    torch.testing.assert_close(got, want, rtol=0, atol=limit)


@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention(calls, masked):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = normal(2, L, 8)
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    options = {"attn_mask": mask, "is_causal": True} if masked else {}
    assert_same_module(module, x, x, x, need_weights=False, **options)
    assert calls.call_count == 1


@pytest.mark.parametrize("training", [False, True])
def test_transformer_encoder_layer(calls, no_fast_path, training):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64
    ).train(training)
    padding = torch.arange(L) >= torch.tensor([[L], [3]])
    with torch.set_grad_enabled(training):
        assert_same_module(
            layer, normal(2, L, 8), src_key_padding_mask=padding
        )
    assert calls.call_count == 1


# Errors ------------------------------------------------------------------

Q, K, V = inputs(2, 4)
ERRORS = {
    "attn_mask and is_causal are both given": (
        (Q, K, V), {"attn_mask": torch.ones(L, S) > 0, "is_causal": True}
    ),
    "attn_mask has dtype torch.int32": (
        (Q, K, V), {"attn_mask": torch.ones(L, S, dtype=torch.int32)}
    ),
    r"attn_mask has shape \(3, 7\)": (
        (Q, K, V), {"attn_mask": torch.ones(3, S) > 0}
    ),
    r"attn_mask has shape \(1, 1, 1, 5, 7\)": (
        (Q, K, V), {"attn_mask": torch.ones(1, 1, 1, L, S) > 0}
    ),
    "attn_mask is of type list": ((Q, K, V), {"attn_mask": [True]}),
    "dropout_p is 1.5": ((Q, K, V), {"dropout_p": 1.5}),
    "key has dtype torch.float32": ((Q, K.float(), V), {}),
    "key has head_dim 7, expected 8": ((Q, K[..., 1:], V), {}),
    "value has seqlen 6, expected 7": ((Q, K, V[..., 1:, :]), {}),
    r"query has shape \(8,\)": ((Q[0, 0, 0], K, V), {}),
    "pass enable_gqa=True": ((Q, K[:, ::2], V[:, ::2]), {}),
    "a multiple of key heads": ((Q, K[:, 1:], V[:, 1:]), {"enable_gqa": True}),
    r"query \(2, 4, 5, 8\), key \(3, 4, 5, 8\)": (
        (Q, *[normal(3, 4, L, E)] * 2), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", ERRORS)
def test_errors(words):
    tensors, options = ERRORS[words]
    with pytest.raises(cuflash.CuflashError, match=words):
        ours(*tensors, **options)
