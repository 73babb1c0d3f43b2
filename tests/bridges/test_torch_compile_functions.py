"""A user's score and mask inside compiled functions."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from flex_cases import HEADS, MASKS, SEQLEN, inputs  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402
from torch_data import assert_equal  # noqa: E402

from cuflash.errors import UnsupportedError  # noqa: E402
from cuflash.expressions import serial, trace  # noqa: E402
from cuflash.torch import (  # noqa: E402
    attention,
    create_block_mask,
    flex_attention,
)

pytestmark = pytest.mark.slow

QKV = inputs(torch.float32)
TABLE = torch.cos(torch.arange(HEADS * 2 * SEQLEN) * 1.0).reshape(HEADS, -1)
TABLE.requires_grad_()


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def named(score, b, h, q_idx, kv_idx, *, table, rate):
    return score + rate * table[h, q_idx - kv_idx + SEQLEN]


def scaled(factor):
    gain = torch.tensor(0.5)
    return lambda s, b, h, i, j: gain * s + factor * TABLE[h, i - j + SEQLEN]


def rows_of(seqlen):
    given = inputs(torch.float32, seqlen)
    return [x.detach().transpose(1, 2).requires_grad_() for x in given]


def call_by_name(*qkv):
    rows = [x.transpose(1, 2) for x in qkv]
    arrays = {"table": TABLE, "rate": 0.5}
    return attention(*rows, score_mod=named, mod_arrays=arrays) * 2


def blocks_of(module):
    make = getattr(module, "create_block_mask", module)
    mask = MASKS["documents"]
    return make(mask, None, None, SEQLEN, SEQLEN, device="cpu", BLOCK_SIZE=16)


SCORE = scaled(2)
BLOCKS = {"ours": blocks_of(create_block_mask), "theirs": blocks_of(theirs)}
CALLS = {
    "by name": call_by_name,
    "closures": lambda *qkv: flex_attention(*qkv, SCORE),
    "ours": lambda *qkv: flex_attention(*qkv, None, BLOCKS["ours"]),
    "theirs": lambda *qkv: flex_attention(*qkv, SCORE, BLOCKS["theirs"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name):
    leaves = QKV if name == "ours" else [*QKV, TABLE]
    got, expected = (
        [out, *torch.autograd.grad(out.square().sum(), leaves)]
        for out in (f(*QKV) for f in (compiled(CALLS[name]), CALLS[name]))
    )
    assert_equal(got, expected)


def test_other_numbers_and_tensors_of_a_closure():
    """A number is part of the program, a tensor an input of it."""
    call = compiled(flex_attention)
    for factor in (1, 2, 1):
        score = scaled(factor)
        expected = flex_attention(*QKV, score)
        assert_equal([call(*QKV, score)], [expected])
        with torch.no_grad():
            TABLE.neg_()


def test_a_function_made_inside():
    """A break in the graph; with fullgraph an error that says what to do."""

    def call(query, key, value, gain):
        score = lambda s, b, h, i, j: s * gain[h]  # noqa: E731
        return flex_attention(query, key, value, score) * 2

    given = (*(x.detach() for x in QKV), torch.ones(HEADS) / 2)
    # PyTorch 2.14 and newer name where the graph breaks.
    with pytest.raises(Exception, match="make it outside, or|is_made_outside"):
        compiled(call)(*given)
    torch._dynamo.reset()
    broken = torch.compile(call, backend="aot_eager")
    assert_equal([broken(*given)], [call(*given)])


def test_a_tensor_that_no_path_leads_to():
    hidden = {1.0: torch.zeros(HEADS)}

    def score(s, b, h, q_idx, kv_idx):
        return s + hidden[1.0][h]

    with pytest.raises(Exception, match="pass it by mod_arrays"):
        compiled(lambda *qkv: flex_attention(*qkv, score))(*QKV)


# Of PyTorch 2.15's own check.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_operators_are_those_that_torch_checks():
    text, (q, k, v) = graphs_of(named, table=TABLE), rows_of(3)
    torch.library.opcheck(
        torch.ops.cuflash.function_attention,
        (q, k, v, [TABLE], [0.5], text),
        {"causal": True},
    )


def test_gradients_of_operators_have_none():
    text, (q, k, v) = graphs_of(named, table=TABLE), rows_of(3)
    call = torch.ops.cuflash.function_attention
    out, _ = call(q, k, v, [TABLE], [0.5], text)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="in eager mode"):
        dq.sum().backward()


def graphs_of(function, **arrays):
    kinds = {n: trace.ArrayKind("float32", x.ndim) for n, x in arrays.items()}
    given = trace.Given((*kinds.items(),), (("rate", "real"),))
    roots = [("score_mod", trace.record(function, "score_mod", given)[0])]
    text = serial.dumps(roots)
    assert serial.loads(text) == tuple(roots)
    return text


def test_text_keeps_every_number():
    def odd(score, b, h, q_idx, kv_idx):
        far = (q_idx > 2**40) | ~(kv_idx < -(2**60))
        numbers = -0.0 * score + float("inf") * h + 0.1 + (b == 1) * 2.0**-1074
        return numbers + far * 1.0

    root, _ = trace.record(odd, "score_mod", trace.Given())
    text = serial.dumps([("score_mod", root)])
    assert serial.loads(text)[0][1] is root


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_a_block_mask_that_compiled_code_makes():
    def call(*qkv):
        mask = create_block_mask(causal, None, None, SEQLEN, SEQLEN)
        return flex_attention(*qkv, block_mask=mask)

    assert_equal(compiled(call)(*QKV), call(*QKV))
