"""NumPy calls with each pair of options, against plain attention.

Many queries of few keys, and few of many: by small scores, whose maximum no
one takes, and by large ones.
"""

from itertools import combinations

import pytest

import cuflash
from helpers import expected
from helpers.compare import (
    assert_forward_matches,
    assert_gradients_match,
    assert_matches,
)
from helpers.data import Case, inputs, lse_gradient
from helpers.derivatives import (
    INPUTS,
    call_double_backward,
    call_jvp,
    expected_double_backward,
    expected_jvp,
    tangents,
)
from helpers.options import TABLE, fields_of

NAMES = [name for name, data in TABLE.items() if data.effect]
SETS = [(), *combinations(NAMES, 1), *combinations(NAMES, 2)]
each_set = pytest.mark.parametrize(
    "names", SETS, ids=["-".join(x) or "none" for x in SETS]
)
# With a scale of 12, some scores are above 88: e^89 is inf in float32.
SHAPES = {
    "queries": {"seqlen_q": 300, "seqlen_k": 4},
    "keys": {"seqlen_q": 3, "seqlen_k": 270, "scale": 12.0, "causal": True},
}
each_shape = pytest.mark.parametrize("shape", SHAPES)


class Far(Case):
    """Options that move scores beyond what exp() of float32 can hold.

    e^-104 is 0: a slope of 1/2 takes 148 from the score of the farthest of
    300 queries, and bias 150 from all.
    """

    def options(self):
        given = super().options()
        if "alibi_slopes" in given:
            given["alibi_slopes"] = given["alibi_slopes"] * 0 + 0.5
        if "bias" in given:
            given["bias"] = given["bias"] - 150
        if "sink" in given:
            given["sink"] = given["sink"] + 100
        return {
            x: y.astype("f") if x in ("alibi_slopes", "bias", "sink") else y
            for x, y in given.items()
        }


def case_of(names, shape, dtype="float32"):
    kind = Far if shape == "queries" else Case
    fields = {**fields_of(names), **SHAPES[shape]}
    return kind(dtype, 2, num_heads_q=2, head_dim=4, head_dim_v=3,
                seed=len(names), **fields)  # fmt: skip


@each_set
@each_shape
def test_forward_and_backward(names, shape):
    case = case_of(names, shape)
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, **case.call(), return_lse=True)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    dlse = lse_gradient(case) if len(names) == 1 else None
    grads = cuflash.backward(
        dout, q, k, v, out, lse, **case.call(), **case.asked(), dlse=dlse
    )
    want = expected.backward(dout, q, k, v, dlse=dlse, **case.meaning())
    assert_gradients_match(grads, want, case)


@each_set
@each_shape
def test_derivatives(names, shape):
    """Of what moves, some is left out.

    Keys in float64, whose bounds see any wrong factor; queries in float32,
    where exp() of `Far` is 0.
    """
    case = case_of(names, shape, "float64" if shape == "keys" else "float32")
    left_out = INPUTS[(len("".join(names)) + len(shape)) % 5]
    check_derivatives(case, [x for x in INPUTS if x != left_out])


def check_derivatives(case, moving):
    direction = tangents(case, moving)
    *_, out_dot, lse_dot = call_jvp(case, direction)
    want = dict(zip(("out_dot", "lse_dot"), expected_jvp(case, direction),
                    strict=True))  # fmt: skip
    got = {"out_dot": out_dot, "lse_dot": lse_dot}
    got |= call_double_backward(case, direction)
    want |= expected_double_backward(case, direction)
    for name, x in want.items():
        assert_matches(got[name], x, f"{name}, {moving} move", case)


SUBSETS = [x for n in range(6) for x in combinations(INPUTS, n)]
OF_SUBSETS = {
    "all": {"softcap": 2.0, "dropout": 0.25, "arrays_of": ("bias", "sink")},
    "dropout": {"dropout": 0.25},
    "softcap": {"softcap": 2.0},
}


@pytest.mark.parametrize("options", OF_SUBSETS)
def test_any_inputs_move(options):
    """Each subset of them; those that a call lacks do not."""
    fields = OF_SUBSETS[options]
    case = Case("float64", 2, 9, 11, 2, 1, 4, 3, seed=5, **fields)
    there = {"q", "k", "v", *fields.get("arrays_of", ())}
    for moving in SUBSETS:
        if there.issuperset(moving):
            check_derivatives(case, moving)
