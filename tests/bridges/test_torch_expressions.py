"""PyTorch's functions in a score_mod or mask_mod."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests of torch's functions")

from torch.nn import functional  # noqa: E402

import cuflash  # noqa: E402
from cuflash.errors import ExpressionError  # noqa: E402
from helpers.compare import assert_allclose  # noqa: E402

pytestmark = pytest.mark.slow

QUERIES, KEYS, HEADS = 9, 13, 2
Q, K = (
    np.random.default_rng(n).standard_normal((1, n, HEADS, 8))
    for n in (QUERIES, KEYS)
)

# Of i - j, from -12 to 8, and of i and j, which are ints.
FUNCTIONS = {
    "where": lambda d, i, j: torch.where(torch.ge(i, j), d, -0.5),
    "minimum": lambda d, i, j: torch.minimum(d, i) + torch.min(i, j),
    "maximum": lambda d, i, j: torch.maximum(d, i) + torch.max(i, j),
    "abs": lambda d, i, j: torch.abs(d) + torch.sign(i - j),
    "clamp": lambda d, i, j: torch.clamp(d, max=2) + torch.clamp(i, 1, 3),
    "clamp_min": lambda d, i, j: torch.clamp_min(d, -3),
    "clip": lambda d, i, j: torch.clip(d, min=-2, max=1),
    "relu": lambda d, i, j: torch.nn.functional.relu(d) - torch.relu(-d),
    "exp": lambda d, i, j: torch.exp(d / 9) + torch.exp2(d / 9),
    "log": lambda d, i, j: torch.log1p(abs(d)) + torch.log(j + 1.0),
    "tanh": lambda d, i, j: torch.tanh(d) + torch.sigmoid(d),
    "atan": lambda d, i, j: torch.atan(d) + d.arctan(),
    "fmod": lambda d, i, j: torch.fmod(d, 1.25) + torch.fmod(i - j, 3),
    "lerp": lambda d, i, j: torch.lerp(d, d * d, 0.25) - torch.lerp(d, -d, d),
    "logaddexp": lambda d, i, j: torch.logaddexp(d, 0.5 * d),
    "erf": lambda d, i, j: torch.erf(d) + torch.special.erfc(d / 9) + d.erf(),
    "gelu": lambda d, i, j: (
        functional.gelu(d)
        + functional.gelu(d, approximate="none")
        - functional.gelu(d, approximate="tanh")
    ),
    "softplus": lambda d, i, j: (
        functional.softplus(3 * d) - functional.logsigmoid(d)
    ),
    "silu": lambda d, i, j: functional.silu(d),
    "masked_fill": lambda d, i, j: d.masked_fill(i < j, 0.5),
    "div": lambda d, i, j: d + torch.div(i - j, 4, rounding_mode="floor"),
    "sqrt": lambda d, i, j: torch.sqrt(abs(d)) + torch.rsqrt(j + 1.0),
    "sin": lambda d, i, j: torch.sin(d) + torch.cos(d),
    "floor": lambda d, i, j: torch.floor(d / 2) + torch.ceil(d / 3),
    "round": lambda d, i, j: torch.round(d / 2) + torch.trunc(d / 3),
    "remainder": lambda d, i, j: torch.remainder(i - j, 5) + (i - j) % 3,
    "floor_divide": lambda d, i, j: torch.floor_divide(i - j, 4) + d,
    "arithmetic": lambda d, i, j: torch.sub(torch.add(d, i), torch.mul(i, j)),
    "rsub": lambda d, i, j: torch.rsub(d, 2) + torch.true_divide(i, j + 1),
    "power": lambda d, i, j: torch.pow(d, 2) + torch.square(i),
    "logical": lambda d, i, j: torch.where(
        torch.logical_and(i > 2, torch.logical_not(j < 5)), d, 0.0
    ),
    "types": lambda d, i, j: d.to(torch.int32) + (i - j).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_pytorchs(name):
    function = FUNCTIONS[name]

    def biased(score, b, h, i, j):
        return score + function((i - j) * 1.0, i, j)

    i, j = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    bias = function((i - j) * 1.0, i, j).double()[None, None].numpy()
    got = cuflash.forward(Q, K, K, score_mod=biased)
    # PyTorch computes in float32: scores below 2^7 are wrong by 2^-24 of
    # them up to 8 times, and out, of size 1, by as much as its scores.
    want = cuflash.forward(Q, K, K, bias=np.broadcast_to(bias, _PAIRS))
    assert_allclose(got, want, "out", atol=2.0**-14)


_PAIRS = 1, HEADS, QUERIES, KEYS

REFUSED = {
    "max of a dimension": (
        lambda s, b, h, i, j: s + torch.max(i, 0), "write torch.maximum(a, b)",
    ),
    "rounding": (
        lambda s, b, h, i, j: s + torch.div(i, 2, rounding_mode="trunc"),
        "write a // b",
    ),
    "beta": (
        lambda s, b, h, i, j: functional.softplus(s, 2.0), "expressions know",
    ),
    "alpha": (
        lambda s, b, h, i, j: torch.add(s, i, alpha=2), "write a + alpha * b",
    ),
    "slope": (
        lambda s, b, h, i, j: functional.leaky_relu(s, 0.2),
        "of NumPy's and SciPy's",
    ),
    "number of a tensor": (
        lambda s, b, h, i, j: torch.tensor(2.0) * s, "x.item()",
    ),
    "tensor": (
        lambda s, b, h, i, j: s + torch.zeros(9)[j], "pass it by mod_arrays",
    ),
    "unknown": (
        lambda s, b, h, i, j: torch.erfinv(s), "of NumPy's and SciPy's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_others_name_the_line_and_the_cure(name):
    function, cure = REFUSED[name]
    with pytest.raises(ExpressionError) as caught:
        cuflash.forward(Q, K, K, score_mod=function)
    said = str(caught.value)
    assert cure in said and f"{__file__}, line " in said, said
