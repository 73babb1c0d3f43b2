"""`score_mod`, `mask_mod` and what they read in readouts of torch tensors."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers.compare import assert_allclose, assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow


def normal(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


Q, K = normal(2, 7, 4, 8, seed=0), normal(2, 9, 2, 8, seed=1)
TABLE, CAP = normal(4, 16, seed=2), normal(4, seed=3).requires_grad_()
IDS = torch.arange(9) // 3
OF_ROWS = normal(4, 7, seed=4)


def score(s, b, h, i, j, *, table, rate):
    return s * (1 + rate * table[h, i - j + 8]) + CAP[h]


def mask(b, h, i, j):
    return (IDS[j] < 2) | (i >= j)


def functions(table):
    given = {"table": table, "rate": 0.5}
    return {"score_mod": score, "mask_mod": mask, "mod_arrays": given}


_, LSE = cuflash.torch.attention(
    Q, K, K, return_lse=True, **functions(TABLE)
)  # fmt: skip
LSE = LSE.detach()
CALLS = {
    "weights": ("weights", {"queries": [1, -1, 3], "keys": [0, 4, 4]}),
    "all": ("weights", {}),
    "sums": ("weight_sums", {"row_weights": OF_ROWS}),
    "maxima": ("weight_sums", {"reduce": "max"}),
    "entropy": ("entropy", {}),
}
each_call = pytest.mark.parametrize("name", CALLS)


def call(name, q=Q, table=TABLE):
    function, asked = CALLS[name]
    own = {**functions(table), **asked}
    return getattr(cuflash.torch, function)(q, K, LSE, **own)


def loss(name, q, table):
    return call(name, q, table).square().sum() / 2


def gradients_of(name):
    """Those of NumPy arrays: q's, the table's, that of CAP."""
    function, asked = CALLS[name]
    asked = {
        x: y.numpy() if isinstance(y, torch.Tensor) else y
        for x, y in asked.items()
    }
    read = {"table": TABLE, "cap": CAP, "ids": IDS}
    arrays = {x: y.detach().numpy() for x, y in read.items()}
    dq, _, _, dmod = getattr(cuflash, f"{function}_backward")(
        call(name).detach().numpy(), *(x.numpy() for x in (Q, K, LSE)),
        score_mod=lambda s, b, h, i, j, *, table, rate, cap: (
            s * (1 + rate * table[h, i - j + 8]) + cap[h]
        ),
        mask_mod=lambda b, h, i, j, *, ids: (ids[j] < 2) | (i >= j),
        mod_arrays={**arrays, "rate": 0.5}, return_dmod=("table", "cap"),
        **asked,
    )  # fmt: skip
    return [torch.from_numpy(x) for x in (dq, dmod["table"], dmod["cap"])]


def assert_gradients(name, got):
    for x, y in zip(got, gradients_of(name), strict=False):
        # The same sums of float64.
        assert_allclose(x.detach(), y, name, rtol=0, atol=1e-12)


@each_call
def test_gradients_are_those_of_numpy(name):
    q, table = Q.clone().requires_grad_(), TABLE.clone().requires_grad_()
    found = torch.autograd.grad(loss(name, q, table), (q, table, CAP))
    assert_gradients(name, found)


@each_call
def test_transforms(name):
    both = torch.func.grad(lambda q, t: loss(name, q, t), (0, 1))
    assert_gradients(name, both(Q, TABLE))
    found = torch.func.vmap(both, (0, None))(torch.stack([Q, 2 * Q]), TABLE)
    assert_gradients(name, [x[0] for x in found])


@each_call
def test_gradients_of_several_cotangents_at_once(name):
    wrt = Q.clone().requires_grad_(), TABLE.clone().requires_grad_(), CAP
    got = call(name, *wrt[:2])
    each = torch.stack([2 * got.detach(), got.detach()])

    def gradients(cotangents, **options):
        return torch.autograd.grad(
            got, wrt, cotangents, retain_graph=True, **options
        )

    batched = gradients(each, is_grads_batched=True)
    for found in (batched, torch.func.vmap(gradients)(each)):
        assert_gradients(name, [x[1] for x in found])
        assert_gradients(name, [x[0] / 2 for x in found])


def test_gradients_of_row_weights_of_several_cotangents_at_once():
    rows = OF_ROWS.clone().requires_grad_()

    def sums(rows):
        return cuflash.torch.weight_sums(
            Q, K, LSE, row_weights=rows, **functions(TABLE)
        )[1, 2]

    jacobian = torch.autograd.functional.jacobian
    want = jacobian(sums, rows)
    assert_arrays_equal(jacobian(sums, rows, vectorize=True), want, "rows")


@pytest.mark.parametrize("name", ["weights", "sums", "entropy"])
def test_compiled_in_one_graph(name):
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    q, table = Q.clone().requires_grad_(), TABLE.clone().requires_grad_()
    found = torch.autograd.grad(compiled(name, q, table), (q, table, CAP))
    assert_gradients(name, found)


def test_block_masks_and_errors():
    blocks = cuflash.torch.create_block_mask(mask, None, None, 7, 9)
    got = cuflash.torch.entropy(Q, K, LSE, mask_mod=blocks)
    want = cuflash.torch.entropy(Q, K, LSE, mask_mod=mask)
    assert_arrays_equal(got, want, "of a block mask")
    with pytest.raises(cuflash.ValueRangeError, match="mod_arrays is given"):
        cuflash.torch.entropy(Q, K, LSE, mod_arrays={"table": TABLE})
    table = TABLE.clone().requires_grad_()
    found = torch.autograd.grad(
        loss("entropy", Q, table), table, create_graph=True
    )
    with pytest.raises(cuflash.UnsupportedError, match="second derivatives"):
        found[0].sum().backward()
