"""Arguments that say what a call does anyway are taken, in each kind of call.

They change nothing, on NumPy, and a plan exists on each GPU that has one
without them.
"""

import functools

import numpy as np
import pytest

import cuflash
from cuflash.plans.plan import device_of_arch, plan
from cuflash.request.validate import attention as validate
from cuflash.request.validate import derivatives as validate_derivatives
from helpers.compare import assert_bitwise

Q, K, HEADS, D = 6, 7, 2, 16
ARCHS = "sm_75", "sm_80", "sm_90a", "sm_120"
RNG = np.random.default_rng(0)


def drawn(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


QKV = {
    "q": drawn(Q, HEADS, D),
    "k": drawn(K, HEADS, D),
    "v": drawn(K, HEADS, D),
}
MOVES = {x: drawn(*y.shape) for x, y in QKV.items()}
DOUT, DLSE = drawn(Q, HEADS, D), drawn(HEADS, Q)


def offsets(*numbers):
    return np.array(numbers, np.int32)


def ids(n):
    return np.arange(n, dtype=np.int32) // 3


KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "blocks": {"block_q": 16, "block_k": 8},
    "block_k": {"block_k": 32},
    "precision": {"precision": "tf32x3"},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": np.ones(HEADS, np.float32)},
    "bias": {"bias": drawn(Q, K)},
    "mask": {"mask": drawn(Q, K) > -1},
    "sink": {"sink": drawn(HEADS)},
    "segments": {"segment_ids_q": ids(Q), "segment_ids_k": ids(K)},
    "dropout": {"dropout": 0.5, "seed": 3},
    "packed": {
        "cu_seqlens_q": offsets(0, 2, Q),
        "cu_seqlens_k": offsets(0, 4, K),
    },
}
# Of all calls, of packed ones, and of one direction.
NONE = dict.fromkeys(
    ("scale", "block_q", "block_k", "precision", "window", "softcap",
     "alibi_slopes", "bias", "mask", "sink", "segment_ids_q", "segment_ids_k",
     "seed", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
     "max_seqlen_k")
)  # fmt: skip
SAYINGS = [
    *({name: x} for name, x in NONE.items()),
    NONE,
    {"scale": D**-0.5},
    {"scale": np.float64(D**-0.5)},
    {"causal": False},
    {"causal": np.False_},
    {"window": (None, None)},
    {"window": (Q + K, None)},
    {"window": (None, Q + K)},
    {"window": (K - 1, Q - 1)},
    {"window": [2**31, 2**31]},
    {"dropout": 0.0},
    {"dropout": 0},
    {"mask": np.ones((Q, K), bool)},
    {"mask": np.ones((1, 1), bool)},
]
OF_PACKED = [
    {"max_seqlen_q": 4, "max_seqlen_k": 4},
    {"max_seqlen_q": Q, "max_seqlen_k": K},
    {"max_seqlen_q": 2**31 - 1},
]
OF_CALLS = {
    "forward": [
        {"num_splits": None},
        {"num_splits": 1},
        {"num_splits": np.int64(1)},
        {"out": None},
    ],
    "backward": [
        {"deterministic": False},
        {"dlse": None},
        {"dlse": np.zeros_like(DLSE)},
        {"dq": None, "dk": None, "dv": None},
        {"return_dbias": False, "return_dsink": False},
        {"return_dbias": np.False_},
    ],
    "jvp": [
        {"bias_dot": None, "sink_dot": None},
        {"bias_dot": None},
    ],
    "double_backward": [
        {"deterministic": False},
        {"dlse": None},
        {"dlse": np.zeros_like(DLSE)},
        {"ddbias": None, "ddsink": None},
        {"return_d2bias": False, "return_d2sink": False},
    ],
}


@functools.cache
def arguments(call, kind):
    """Return the arguments of a call of a kind."""
    given = {**QKV, **KINDS[kind]}
    if call == "forward":
        return given | {"return_lse": True}
    if call == "jvp":
        dots = {f"{x}_dot": y for x, y in MOVES.items()}
        return given | dots | {"return_lse": True}
    out, lse = cuflash.forward(**given, return_lse=True)
    given |= {"dout": DOUT, "out": out, "lse": lse}
    if call == "backward":
        return given
    dots = {f"dd{x}": y for x, y in MOVES.items()}
    return given | dots | {"return_ddlse": True}


def sayings(call, kind):
    """Return what may be said of a call and says nothing new."""
    own = KINDS[kind]
    if kind == "packed":
        yield from OF_PACKED
    for said in (*SAYINGS, *OF_CALLS[call]):
        if said is NONE:
            yield {x: y for x, y in NONE.items() if x not in own}
        elif not own.keys() & said.keys():
            # Packed sequences have no mask.
            if kind != "packed" or said.get("mask") is None:
                yield said


def check_plans(call, given, said):
    """A GPU that has a plan has one for what is said beside it, too."""
    of = validate if call in ("forward", "backward") else validate_derivatives
    # As the public calls do, which leave out what is None.
    said = {x: y for x, y in said.items() if y is not None}
    problems = [
        getattr(of, call)(**x).problem for x in (given, {**given, **said})
    ]
    for arch in ARCHS:
        device = device_of_arch(arch)
        try:
            plan(problems[0], device)
        except (cuflash.UnsupportedError, cuflash.ValueRangeError):
            continue
        plan(problems[1], device)


@pytest.mark.parametrize("call", OF_CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes(call, kind):
    given = arguments(call, kind)
    want = getattr(cuflash, call)(**given)
    for said in sayings(call, kind):
        got = getattr(cuflash, call)(**{**given, **said})
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a, b, f"with {said}")
        check_plans(call, given, said)


# Caches and rotations -------------------------------------------------------

BATCH, CAPACITY = 2, 8
CACHES = {
    "k_cache": drawn(BATCH, CAPACITY, HEADS, D),
    "v_cache": drawn(BATCH, CAPACITY, HEADS, D),
}
LENGTHS = np.array([5, 5], np.int32)
OF_CACHES = [
    *({x: None} for x in (
        "k_new", "v_new", "page_table", "cache_batch_idx", "cache_leftpad",
        "cu_seqlens_q", "max_seqlen_q", "rotary_cos", "rotary_sin", "k_scale",
        "v_scale", "scale", "window", "softcap", "alibi_slopes", "sink",
        "num_splits", "out",
    )),
    {"num_splits": 1},
    {"num_splits": 2},
    {"window": (None, None)},
    {"window": (CAPACITY, CAPACITY)},
    {"causal": False},
    {"scale": D**-0.5},
    {"rotary_interleaved": False},
    {"cache_seqlens": 5},
    {"cache_seqlens": np.int64(5)},
    {"cache_batch_idx": np.arange(BATCH, dtype=np.int32)},
    {"cache_leftpad": np.zeros(BATCH, np.int32)},
]  # fmt: skip


@pytest.mark.parametrize("said", OF_CACHES, ids=str)
def test_nothing_changes_with_caches(said):
    given = {"q": drawn(BATCH, 3, HEADS, D), "cache_seqlens": LENGTHS}
    given |= {**CACHES, "return_lse": True}
    want = cuflash.forward_kvcache(**given)
    got = cuflash.forward_kvcache(**given | said)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b, str(said))


@pytest.mark.parametrize(
    "said",
    [{"positions": None}, {"positions": np.arange(Q)}, {"out": None},
     {"positions": np.arange(Q, dtype=np.int32)}, {"interleaved": False},
     {"inverse": False}],
    ids=str,
)  # fmt: skip
def test_nothing_changes_rotated(said):
    given = QKV["q"], drawn(Q, D // 2), drawn(Q, D // 2)
    want = cuflash.apply_rotary(*given)
    assert_bitwise(cuflash.apply_rotary(*given, **said), want, str(said))


@pytest.mark.parametrize("call", OF_CALLS)
def test_one_packed_sequence(call):
    """It is a call without offsets."""
    given = arguments(call, "plain")
    one = {"cu_seqlens_q": offsets(0, Q), "cu_seqlens_k": offsets(0, K)}
    want = getattr(cuflash, call)(**given)
    got = getattr(cuflash, call)(**given, **one)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b, call)
