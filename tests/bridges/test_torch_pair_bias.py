"""triangle_attention and attention_pair_bias of `cuflash.torch`."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import assert_equal  # noqa: E402

import cuflash  # noqa: E402
from cuflash.torch import attention_pair_bias, triangle_attention  # noqa: E402
from helpers.compare import assert_finite  # noqa: E402

pytestmark = pytest.mark.slow

BATCH, ROWS, HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 2, 3, 2, 5, 7, 6
# Sums of up to 7 terms of float64, of numbers up to 10, in any order.
BOUND = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.requires_grad_(grad)


def triangle_inputs(batch=BATCH):
    lead = (batch, ROWS, HEADS)
    return [
        normal(*lead, SEQLEN_Q, HEAD_DIM, seed=1),
        normal(*lead, SEQLEN_K, HEAD_DIM, seed=2),
        normal(*lead, SEQLEN_K, HEAD_DIM, seed=3),
        normal(batch, 1, HEADS, SEQLEN_Q, SEQLEN_K, seed=4),
    ]


def some_mask(*shape, seed=5):
    """Two of three are seen, and the first key by all."""
    mask = normal(*shape, seed=seed, grad=False) > -0.5
    mask[..., 0] = True
    return mask


def dense(q, k, v, bias, mask, scale):
    s = q @ k.transpose(-1, -2) * scale + bias
    s = s.masked_fill(~mask, -torch.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1, keepdim=True)


def assert_same(call, other, tensors):
    """Results and gradients of two functions of the same tensors."""
    got, want = call(), other()
    torch.testing.assert_close(got, want, **BOUND)
    dout = torch.cos(torch.arange(got.numel())).reshape(got.shape)
    both = [torch.autograd.grad(x, tensors, dout.to(x)) for x in (got, want)]
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y, **BOUND)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_triangles_are_those_of_the_matrix(scale, deterministic):
    inputs = triangle_inputs()
    mask = some_mask(BATCH, ROWS, 1, 1, SEQLEN_K)
    by_matrix = HEAD_DIM**-0.5 if scale is None else scale
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert_same(
            lambda: triangle_attention(*inputs, mask.to(torch.int8), scale),
            lambda: dense(*inputs, mask, by_matrix)[0],
            inputs,
        )
    finally:
        torch.use_deterministic_algorithms(False)


def test_lse_and_no_batch():
    inputs = triangle_inputs(1)
    mask = torch.ones(1, 1, 1, 1, SEQLEN_K, dtype=torch.bool)
    want, want_lse = dense(*inputs, mask, HEAD_DIM**-0.5)
    out, lse, maximum = triangle_attention(
        *(x[0] for x in inputs), return_aux=True
    )
    torch.testing.assert_close(out, want[0], **BOUND)
    torch.testing.assert_close(lse, want_lse[0], **BOUND)
    assert maximum is None


def test_a_row_without_keys_is_zero():
    inputs = triangle_inputs(1)
    mask = torch.ones(1, ROWS, 1, 1, SEQLEN_K)
    mask[:, 1] = 0
    out = triangle_attention(*inputs, mask)
    assert_equal(out[:, 1], torch.zeros_like(out[:, 1]))
    grads = torch.autograd.grad(out.sum(), inputs)
    for name, x in zip(("dq", "dk", "dv", "dbias"), grads, strict=True):
        assert_finite(x.numpy(), name)


def test_gradients_of_one_element_are_views():
    """Those of x[0] would be zeros with a copy inside."""
    nodes, names = [triangle_attention(*triangle_inputs(1)).grad_fn], set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [x for x, _ in node.next_functions if x is not None]
    assert not [x for x in names if x.startswith(("Select", "Stack"))]


def test_second_derivatives_of_triangles():
    inputs = [x[:, :2, :1, :3] for x in triangle_inputs(1)]
    inputs[3] = triangle_inputs(1)[3][:, :, :1, :3, :3]
    inputs = [x.detach().requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(triangle_attention, inputs)


# attention_pair_bias ---------------------------------------------------------

WIDTH, WIDTH_Z = 4, 3
COLUMNS = HEADS * HEAD_DIM


def pair_inputs(multiplicity=1):
    rows = BATCH * multiplicity
    return {
        "s": normal(rows, SEQLEN_Q, WIDTH, seed=1),
        "q": normal(rows, HEADS, SEQLEN_Q, HEAD_DIM, seed=2),
        "k": normal(rows, HEADS, SEQLEN_K, HEAD_DIM, seed=3),
        "v": normal(rows, HEADS, SEQLEN_K, HEAD_DIM, seed=4),
        "z": normal(BATCH, SEQLEN_Q, SEQLEN_K, WIDTH_Z, seed=5),
        "w_proj_z": normal(HEADS, WIDTH_Z, seed=6),
        "w_proj_g": normal(COLUMNS, WIDTH, seed=7),
        "w_proj_o": normal(WIDTH, COLUMNS, seed=8),
        "w_ln_z": normal(WIDTH_Z, seed=9),
        "b_ln_z": normal(WIDTH_Z, seed=10),
        "b_proj_z": normal(HEADS, seed=11),
        "b_proj_g": normal(COLUMNS, seed=12),
        "b_proj_o": normal(WIDTH, seed=13),
    }


def dense_pairs(
    s, q, k, v, z, w_proj_z, w_proj_g, w_proj_o, w_ln_z, b_ln_z, b_proj_z,
    b_proj_g, b_proj_o, mask, multiplicity,
):  # fmt: skip
    mean = z.mean(-1, keepdim=True)
    deviation = (z.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    bias = ((z - mean) / deviation * w_ln_z + b_ln_z) @ w_proj_z.T + b_proj_z
    bias = bias.permute(0, 3, 1, 2).repeat_interleave(multiplicity, 0)
    mask = mask.repeat_interleave(len(q) // len(mask), 0)[:, None, None]
    out, _ = dense(q, k, v, bias, mask, HEAD_DIM**-0.5)
    gate = 1 / (1 + torch.exp(-(s @ w_proj_g.T + b_proj_g)))
    out = out.transpose(1, 2).reshape(*gate.shape)
    return (gate * out) @ w_proj_o.T + b_proj_o


@pytest.mark.parametrize("multiplicity", [1, 2])
def test_pairs_are_those_of_the_matrix(multiplicity):
    given = pair_inputs(multiplicity)
    mask = some_mask(BATCH, SEQLEN_K)
    assert_same(
        lambda: attention_pair_bias(
            **given, mask=mask.float(), num_heads=HEADS
        )[0],
        lambda: dense_pairs(**given, mask=mask, multiplicity=multiplicity),
        list(given.values()),
    )


def test_a_mask_of_each_element():
    given = pair_inputs(2)
    mask = some_mask(2 * BATCH, SEQLEN_K)
    out, _ = attention_pair_bias(**given, mask=mask, num_heads=HEADS)
    want = dense_pairs(**given, mask=mask, multiplicity=2)
    torch.testing.assert_close(out, want, **BOUND)


def test_a_cached_projection():
    given = pair_inputs()
    out, bias = attention_pair_bias(**given, mask=None, num_heads=HEADS)
    cached = given | {"z": bias, "w_proj_z": None}
    again, none = attention_pair_bias(
        **cached, mask=None, num_heads=HEADS, is_cached_z_proj=True,
        return_z_proj=False,
    )  # fmt: skip
    assert_equal(again, out)
    assert none is None


# Empty batches ---------------------------------------------------------------


def test_an_empty_batch_of_triangles():
    inputs = [x.detach()[:0].requires_grad_() for x in triangle_inputs()]
    mask = some_mask(BATCH, ROWS, 1, 1, SEQLEN_K)[:0]
    out, lse, _ = triangle_attention(*inputs, mask, return_aux=True)
    assert out.shape == inputs[0].shape
    assert lse.shape == (*out.shape[:-1], 1)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert [x.shape for x in grads] == [x.shape for x in inputs]


@pytest.mark.parametrize("mask", [None, some_mask(0, SEQLEN_K)])
def test_an_empty_batch_of_pairs(mask):
    given = pair_inputs()
    given |= {x: given[x].detach()[:0] for x in ("s", "q", "k", "v", "z")}
    out, bias = attention_pair_bias(**given, mask=mask, num_heads=HEADS)
    assert out.shape == (0, SEQLEN_Q, WIDTH)
    assert bias.shape == (0, HEADS, SEQLEN_Q, SEQLEN_K)


# Errors ----------------------------------------------------------------------


def test_wrong_shapes_of_triangles():
    q, k, v, bias = triangle_inputs()
    with pytest.raises(cuflash.ShapeError, match="bias has shape .2, 2, 5, 7"):
        triangle_attention(q, k, v, bias[:, 0])
    with pytest.raises(cuflash.ShapeError, match="k has shape .2, 3, 2, 7, 5"):
        triangle_attention(q, k[..., :-1], v, bias)
    with pytest.raises(cuflash.ShapeError, match="q has 3 axes, expected 5"):
        triangle_attention(q[0, 0], k, v, bias)


def test_wrong_shapes_of_pairs():
    given = pair_inputs(2) | {"mask": None}
    with pytest.raises(cuflash.ShapeError, match="num_heads is 3"):
        attention_pair_bias(**given, num_heads=3)
    given["z"] = given["z"][:, :, :-1]
    with pytest.raises(cuflash.ShapeError, match="bias of shape .2, 2, 5, 6"):
        attention_pair_bias(**given, num_heads=HEADS)
    given["w_proj_z"] = None
    with pytest.raises(cuflash.DTypeError, match="unless is_cached_z_proj"):
        attention_pair_bias(**given, num_heads=HEADS)


@pytest.mark.parametrize("name", ["s", "w_proj_g", "b_proj_g", "b_proj_o"])
def test_a_gate_that_would_broadcast(name):
    given = pair_inputs(2) | {"mask": None, "num_heads": HEADS}
    given[name] = given[name][:1]
    with pytest.raises(cuflash.ShapeError, match=f"{name} has shape .1,"):
        attention_pair_bias(**given)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_mask_of_another_batch(rows):
    given = pair_inputs(3)
    mask = some_mask(rows, SEQLEN_K)
    with pytest.raises(cuflash.ShapeError, match=f"mask has shape .{rows}, 7"):
        attention_pair_bias(**given, mask=mask, num_heads=HEADS)


@pytest.mark.parametrize("heads", [2.0, "2", None, True])
def test_heads_that_are_no_integer(heads):
    with pytest.raises(cuflash.DTypeError, match="num_heads is"):
        attention_pair_bias(**pair_inputs(), mask=None, num_heads=heads)
