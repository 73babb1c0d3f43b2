"""What built-in options take over of a user's functions means the same."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuflash.expressions import nodes
from cuflash.expressions.evaluate import ModArrays, Values
from cuflash.expressions.trace import Given, record
from cuflash.request.validate.functions import as_options
from helpers.compare import assert_allclose, assert_arrays_equal

QUERY, KEY = map(nodes.index, ("q_idx", "kv_idx"))
many = settings(max_examples=25 * settings().max_examples)


def recorded(text, role="mask_mod"):
    arguments = "b, h, q_idx, kv_idx"
    if role == "score_mod":
        arguments = f"score, {arguments}"
    return record(eval(f"lambda {arguments}: {text}", {"np": np}), role,
                  Given())[0]  # fmt: skip


def evaluated(node, queries, keys, score=None):
    leaves = {
        QUERY: np.arange(queries)[:, None], KEY: np.arange(keys),
        nodes.index("b"): np.int64(0), nodes.index("h"): np.int64(1),
        nodes.SCORE: score,
    }  # fmt: skip
    (value,) = Values(leaves, ModArrays((), ()), np.float64).of(node)
    return np.broadcast_to(value, (queries, keys))


def seen(causal, window, mask, queries, keys):
    """Return the mask of options and of a graph, if there is one."""
    at = np.arange(queries)[:, None] + keys - queries
    key, (left, right) = np.arange(keys), window
    visible = np.ones((queries, keys), bool)
    if causal:
        visible &= key <= at
    if left is not None:
        visible &= key >= at - left
    if right is not None:
        visible &= key <= at + right
    return visible if mask is None else visible & evaluated(
        mask, queries, keys
    )  # fmt: skip


OFFSETS = st.integers(-12, 12)
SIDES = [
    "q_idx - kv_idx", "kv_idx - q_idx", "q_idx", "kv_idx", "-kv_idx",
    "abs(q_idx - kv_idx)", "np.abs(kv_idx - q_idx)", "kv_idx + q_idx",
    "q_idx * 2 - kv_idx", "h", "q_idx - kv_idx + h",
]  # fmt: skip


@st.composite
def conditions(draw):
    left, right = (
        f"({draw(st.sampled_from(SIDES))} + {draw(OFFSETS)})" for _ in range(2)
    )
    if draw(st.booleans()):
        right = draw(OFFSETS)
    sign = draw(st.sampled_from(["<", "<=", ">", ">=", "=="]))
    return f"({left} {sign} {right})"


@st.composite
def masks(draw):
    parts = draw(st.lists(conditions(), min_size=1, max_size=3))
    signs = draw(st.sampled_from([" & ", " & ", " | "]))
    return signs.join(parts)


SIDE = st.none() | st.integers(0, 6)


@many
@given(
    masks(), st.integers(1, 12), st.integers(1, 12), st.booleans(),
    st.tuples(SIDE, SIDE),
)  # fmt: skip
@example("q_idx >= kv_idx", 5, 9, False, (None, None))
@example("(q_idx - kv_idx < 4) & (q_idx >= kv_idx)", 9, 5, False, (None, None))
@example("abs(q_idx - kv_idx) <= 2", 6, 6, True, (1, None))
@example("q_idx - kv_idx < 2**40", 6, 6, False, (None, None))
@example("~(q_idx < kv_idx)", 6, 6, False, (None, None))
def test_bounds_of_a_distance(text, queries, keys, causal, window):
    mask = recorded(text)
    asked = {"mask_mod": mask, "window": window}
    got_causal, got = as_options(
        asked, causal, queries, keys, packed=False, adds=False
    )
    left, right = got["window"]
    assert (left or 0) >= 0 and (right or 0) >= 0
    assert_arrays_equal(
        seen(got_causal, got["window"], got["mask_mod"], queries, keys),
        seen(causal, window, mask, queries, keys),
        text,
    )


@pytest.mark.parametrize(
    "text",
    [
        "q_idx >= kv_idx", "kv_idx <= q_idx", "q_idx - kv_idx >= 0",
        "kv_idx < q_idx + 1", "(q_idx >= kv_idx) & (q_idx - kv_idx <= 4)",
        "abs(q_idx - kv_idx) < 5",
    ],
)  # fmt: skip
def test_usual_masks_are_options_alone(text):
    asked = {"mask_mod": recorded(text)}
    causal, got = as_options(asked, False, 9, 9, packed=False, adds=False)
    assert got["mask_mod"] is None
    assert causal == (got["window"][1] == 0)


def test_packed_sequences_keep_their_mask():
    asked = {"mask_mod": recorded("q_idx >= kv_idx")}
    found = as_options(asked, False, 9, 9, packed=True, adds=False)
    assert found == (False, asked)


CAPS = {
    "3 * np.tanh(score / 3)": 3.0,
    "np.tanh(score / 3.0) * 3.0": 3.0,
    "3 * np.tanh(score / 3) + q_idx": 3.0,
    "np.exp(3 * np.tanh(score / 3))": 3.0,
    "3 * np.tanh(score / 2)": None,
    "3 * np.tanh(score / 3) + score": None,
    "3 * np.tanh(score / 3) * np.tanh(score / 3)": None,
    "-3 * np.tanh(score / -3)": None,
    "3 * np.tanh(3 / score)": None,
    "np.tanh(score / 3)": None,
    "3 * np.tanh((score + q_idx) / 3)": None,
    "np.where(q_idx > 2, 3 * np.tanh(score / 3), score / 3)": None,
    "3 * np.tanh(score / 3) + np.sin(score / 3)": None,
    "score": None,
    "1e-60 * np.tanh(score / 1e-60)": None,
}


@pytest.mark.parametrize("text", CAPS)
def test_a_softcap(text):
    score = recorded(text, "score_mod")
    _, got = as_options(
        {"score_mod": score}, False, 5, 6, packed=False, adds=False
    )
    cap = got.get("softcap")
    assert cap == CAPS[text]
    x = np.random.default_rng(0).standard_normal((5, 6)) * 4
    inner = x if cap is None else cap * np.tanh(x / cap)
    rest = got["score_mod"]
    found = inner if rest is None else evaluated(rest, 5, 6, inner)
    want = evaluated(score, 5, 6, x)
    assert_allclose(found, want, text, atol=1e-12 * (1 + np.abs(want).max()))


@pytest.mark.parametrize("kept", [{"adds": True}, {"softcap": 5.0}])
def test_a_softcap_after_others_stays(kept):
    score = recorded("3 * np.tanh(score / 3)", "score_mod")
    adds = kept.pop("adds", False)
    asked = {"score_mod": score, **kept}
    _, got = as_options(asked, False, 5, 6, packed=False, adds=adds)
    assert got == asked
