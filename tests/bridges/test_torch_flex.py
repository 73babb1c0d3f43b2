"""`flex_attention`: against torch's own, and against dense scores."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from flex_cases import (  # noqa: E402
    BATCH,
    HEADS,
    MASKS,
    SCORES,
    SEQLEN,
    causal,
    dense,
    inputs,
)
from torch.nn.attention import flex_attention as theirs  # noqa: E402

from cuflash.torch import create_block_mask, flex_attention  # noqa: E402
from helpers.compare import assert_allclose  # noqa: E402

pytestmark = pytest.mark.slow

# Sums of 2^6 terms; float64, and scores below 2^5: 2^-53 of 2^11 at most.
ATOL = 2.0**-42
# The same in float32.
ATOL_FLOAT32 = 2.0**-13


def made_by(function, mask, seqlen=SEQLEN, **sizes):
    make = getattr(function, "create_block_mask", function)
    return make(mask, BATCH, HEADS, seqlen, seqlen, device="cpu", **sizes)


@pytest.fixture
def as_float64():
    """Integers become float64 in torch, too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def eager(monkeypatch):
    """torch's flex_attention without a compiler."""
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(theirs, name, True, raising=False)


def assert_near(got, expected, atol=ATOL):
    for x, y in zip(got, expected, strict=True):
        x, y = x.detach().numpy(), y.detach().numpy()
        assert_allclose(x, y, "result", atol=atol)


def gradients(out, leaves):
    weights = torch.cos(torch.arange(out.numel())).reshape(out.shape)
    return torch.autograd.grad(out, leaves, weights.to(out.dtype))


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_gradients_of_what_they_close_over(name, as_float64):
    score, leaves = SCORES[name]()
    qkv = inputs()
    got = flex_attention(*qkv, score)
    expected = dense(*qkv, score)
    assert_near([got], [expected])
    leaves = [*qkv, *leaves]
    assert_near(gradients(got, leaves), gradients(expected, leaves), 2 * ATOL)


# Whose rows of a table broadcasting does not read: torch's own does, below.
@pytest.mark.parametrize("name", sorted(MASKS.keys() - {"images"}))
def test_masks_and_gradients(name):
    qkv = inputs()
    mask = made_by(create_block_mask, MASKS[name])
    got = flex_attention(*qkv, block_mask=mask)
    expected = dense(*qkv, mask=MASKS[name]).nan_to_num(0)
    assert_near([got], [expected])
    if not got.isnan().any():
        assert_near(gradients(got, qkv), gradients(expected, qkv), 2 * ATOL)


@pytest.mark.parametrize("name", MASKS)
def test_masks_as_torchs(name, eager):
    qkv = [x.detach() for x in inputs(torch.float32)]
    mask = made_by(theirs, MASKS[name], BLOCK_SIZE=16)
    expected = theirs.flex_attention(*qkv, block_mask=mask)
    for given in mask, made_by(create_block_mask, MASKS[name]):
        got = flex_attention(*qkv, block_mask=given)
        assert_near([got], [expected.nan_to_num(0)], ATOL_FLOAT32)


@pytest.mark.parametrize("name", ["alibi", "softcap", "weird", "hidden"])
def test_scores_as_torchs(name, eager):
    score, _ = SCORES[name]()
    qkv = [x.detach() for x in inputs(torch.float32)]
    aux = theirs.AuxRequest(lse=True)
    mask = made_by(theirs, causal, BLOCK_SIZE=16)
    got, expected = (
        function(*qkv, score, mask, scale=0.5, return_aux=aux)
        for function in (flex_attention, theirs.flex_attention)
    )
    assert isinstance(got[1], theirs.AuxOutput)
    pairs = ((x[0], x[1].lse) for x in (got, expected))
    assert_near(*pairs, ATOL_FLOAT32)


@pytest.mark.parametrize("seqlen", [31, 32, 33])
def test_blocks_that_no_mask_mod_tells_of(seqlen):
    """Listed: row i has block i and, in part, block 0; others are hidden."""
    rows = -(-seqlen // 16)
    indices = torch.zeros(1, 1, rows, rows, dtype=torch.int32)
    full = indices.clone()
    full[0, 0, :, 0] = torch.arange(rows)
    counts = torch.ones(1, 1, rows, dtype=torch.int32)
    mask = theirs.BlockMask.from_kv_blocks(
        counts, indices, counts.clone(), full, BLOCK_SIZE=16,
        mask_mod=lambda b, h, i, j: j % 2 == 0, seq_lengths=(seqlen, seqlen),
    )  # fmt: skip
    qkv = inputs(seqlen=seqlen)

    def listed(b, h, i, j):
        return (i // 16 == j // 16) | ((j < 16) & (j % 2 == 0))

    got = flex_attention(*qkv, block_mask=mask)
    assert_near([got], [dense(*qkv, mask=listed)])
    mask.full_kv_num_blocks.zero_()  # found out again
    got = flex_attention(*qkv, block_mask=mask)
    expected = dense(*qkv, mask=lambda b, h, i, j: (j < 16) & (j % 2 == 0))
    assert_near([got], [expected])


def test_grouped_heads_and_a_batch_for_all():
    query, key, value = inputs()
    few = key[:1, :2], value[:1, :2]
    got = flex_attention(query, *few, enable_gqa=True)
    repeated = (x.repeat_interleave(2, 1).expand_as(y)
                for x, y in zip(few, (key, value), strict=True))  # fmt: skip
    assert_near([got], [dense(query, *repeated)])


def test_a_picture_of_the_blocks():
    mask = create_block_mask(causal, None, 1, 40, 40, BLOCK_SIZE=(16, 32))
    assert mask.to_dense().tolist() == [[[[1, 0], [1, 0], [1, 1]]]]
    assert mask.sparsity() == pytest.approx(100 / 3)
    assert mask.shape == (1, 1, 40, 40) and "causal" in repr(mask)
