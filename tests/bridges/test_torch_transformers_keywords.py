"""What models of Transformers hand to the attention function."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")
pytest.importorskip("transformers", reason="tests of its models need it")

from hf_models import oracle  # noqa: E402
from transformers import masking_utils  # noqa: E402

import cuflash  # noqa: E402
from cuflash.torch import masks  # noqa: E402
from cuflash.torch.transformers import attention_function  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

BATCH, HEADS, SEQLEN, WIDTH = 2, 4, 6, 8
CAUSAL = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
LOWEST = torch.finfo(torch.float64).min


def heads(seed, num_heads=HEADS):
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, num_heads, SEQLEN, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def call(mask=None, module=None, **keywords):
    module = torch.nn.Module() if module is None else module
    q, k, v = heads(0), heads(1, 2), heads(2, 2)
    return attention_function(module, q, k, v, mask, scaling=1, **keywords)[0]


def dense(mask):
    """What `call` should give; mask : bool Tensor, (..., seqlen, seqlen)."""
    mask = mask.expand(BATCH, HEADS, SEQLEN, SEQLEN)
    return oracle(None, heads(0), heads(1, 2), heads(2, 2), mask, 1)[0]


def assert_same(got, expected):
    """Sums of 8 and 6 products, of numbers below 10: 14 * 10 * 2^-53."""
    assert (got - expected).abs().max() <= 140 * 2**-53


def padded():
    """A causal mask, and the same as a tensor: (what is handed on, tensor)."""
    tokens = torch.ones(BATCH, SEQLEN, dtype=torch.bool)
    tokens[1, :2] = False
    given = masks.make(BATCH, SEQLEN, SEQLEN, attention_mask=tokens)
    return given, given.tensor()


def test_an_unknown_keyword_is_refused():
    with pytest.raises(
        cuflash.UnsupportedError, match="mystery=Tensor.*eager"
    ):
        call(mystery=torch.zeros(1))


def test_a_keyword_that_is_off_is_none():
    assert_arrays_equal(call(mystery=None, other=False), call(), "call")


def test_harmless_keywords_change_nothing():
    some = {"position_ids": torch.arange(SEQLEN), "use_cache": True}
    assert_arrays_equal(call(**some), call(), "call(**some)")


@pytest.mark.parametrize("name", ["read_index", "block_table"])
def test_batches_of_continuous_batching_are_refused(name):
    with pytest.raises(cuflash.UnsupportedError, match="continuous batching"):
        call(**{name: [torch.zeros(1)]})


INDICES = torch.tensor([0, 5, 2]).expand(BATCH, SEQLEN, 3).int()
CHOSEN = torch.tensor([1, 0, 1, 0, 0, 1]).bool()
# Of the first two heads, block 1 of two keys; of the others, 0 and 2.
BLOCKS = torch.tensor([[1, -1], [0, 2]]).view(1, 2, 1, 2)
BLOCKS = BLOCKS.expand(BATCH, 2, SEQLEN, 2)
OF_BLOCKS = torch.tensor([[0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1]]).bool()
OF_BLOCKS = OF_BLOCKS.repeat_interleave(2, 0).view(1, HEADS, 1, SEQLEN)


def indexer(block_size):
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = block_size
    return module


SPARSE = pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"indices": INDICES}, CHOSEN),
        ({"block_indices": BLOCKS, "module": indexer(2)}, OF_BLOCKS),
    ],
    ids=["indices", "block_indices"],
)


@SPARSE
def test_chosen_keys_of_a_causal_mask(given, chosen):
    assert_same(call(**given), dense(chosen & CAUSAL))


@SPARSE
def test_chosen_keys_of_a_padded_mask(given, chosen):
    mask, tensor = padded()
    assert_same(call(mask, **given), dense(chosen & tensor))
    assert_same(call(tensor, **given), dense(chosen & tensor))


@SPARSE
def test_chosen_keys_of_an_additive_mask(given, chosen):
    _, tensor = padded()
    tensor[1, :, :2] = True  # rows without keys are no part of this
    added = torch.zeros(tensor.shape, dtype=torch.float64)
    added.masked_fill_(~tensor, LOWEST)
    shown = (chosen & tensor).any(-1)[..., None].expand(2, HEADS, SEQLEN, 1)
    shown = shown.transpose(1, 2)
    got, expected = call(added, **given), dense(chosen & tensor)
    assert_same(got * shown, expected * shown)


def test_chosen_keys_of_a_static_cache():
    mask = masks.make(BATCH, 4, SEQLEN)  # the last two keys are to come
    assert mask.num_keys == 4
    q, k, v = heads(0)[:, :, :4], heads(1), heads(2)
    indices = INDICES[:, :4]
    got = attention_function(
        torch.nn.Module(), q, k, v, mask, scaling=1, indices=indices
    )[0]
    shown = (CHOSEN & CAUSAL)[:4].expand(BATCH, HEADS, 4, SEQLEN)
    assert_same(got, oracle(None, q, k, v, shown, 1)[0])


def test_sinks_of_queries():
    generator = torch.Generator().manual_seed(3)
    shape = (BATCH, HEADS, SEQLEN, 1)
    sinks = torch.randn(shape, generator=generator, dtype=torch.float64)
    k = heads(1, 2).repeat_interleave(2, 1)
    scores = heads(0) @ k.transpose(-1, -2)
    scores = scores.masked_fill(~CAUSAL, -torch.inf)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    expected = weights @ heads(2, 2).repeat_interleave(2, 1)
    assert_same(call(sinks=sinks), expected.transpose(1, 2))


def test_gradients_of_sinks_of_queries():
    def out(q, sinks):
        k, v = heads(1)[:1, :1], heads(2)[:1, :1]
        module = torch.nn.Module()
        return attention_function(module, q, k, v, None, sinks=sinks)[0]

    q = heads(0)[:1, :1].requires_grad_()
    sinks = torch.linspace(-1, 1, SEQLEN, dtype=torch.float64)
    sinks = sinks.view(1, 1, SEQLEN, 1).requires_grad_()
    assert torch.autograd.gradcheck(out, (q, sinks), fast_mode=True)


WIDER = [
    masks.make(BATCH, SEQLEN, SEQLEN + 2),
    torch.ones(BATCH, 1, SEQLEN, SEQLEN + 1, dtype=torch.bool),
    torch.zeros(BATCH, 1, SEQLEN, SEQLEN - 1, dtype=torch.float64),
    torch.ones(BATCH, SEQLEN + 1, dtype=torch.int64),
]


@pytest.mark.parametrize(
    "mask", WIDER, ids=["pattern", "bool", "additive", "tokens"]
)
def test_a_mask_of_other_keys_is_refused(mask):
    width = mask.shape[-1]
    with pytest.raises(cuflash.ShapeError, match=f"{width} keys, expected 6"):
        call(mask)


@pytest.mark.parametrize("size", [SEQLEN - 2, SEQLEN - 1, SEQLEN])
def test_a_mask_says_the_window_of_an_encoder(size):
    """Not the keyword, which means one key less on each side."""
    function = masking_utils.sliding_window_bidirectional_mask_function(size)
    mask = masks.make(
        BATCH,
        SEQLEN,
        SEQLEN,
        mask_function=function,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True,
    )
    got = call(mask, sliding_window=size, is_causal=False)
    token = torch.arange(SEQLEN)
    assert_same(got, dense((token - token[:, None]).abs() <= size))


def test_a_tensor_beside_lengths_of_sequences_is_read():
    """It may hide what lengths do not tell: a chunk, a picture."""
    ends = torch.tensor([0, SEQLEN, 2 * SEQLEN])
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    chunks = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
    mask = (chunks & CAUSAL).expand(BATCH, 1, SEQLEN, SEQLEN)
    assert_same(call(mask, **lengths), dense(mask))


def test_a_causal_mask_is_causal_whatever_the_module_says():
    """UMT5's decoder said False in Transformers 5.17."""
    mask = masks.make(BATCH, SEQLEN, SEQLEN)
    assert_same(call(mask, is_causal=False), dense(CAUSAL))
