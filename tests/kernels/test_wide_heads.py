"""Head dimensions above 256.

16 bits on sm80's kernels, float32 on fma, in parts and float64 on mma8, the
rest on simt.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

import strategies
from cuflash.plans.plan import device_of_arch, plan
from helpers import calls
from helpers.backends import CUPY, EMULATED, on_kernels, on_kernels_of
from helpers.checks import (
    check_double_backward,
    check_forward,
    check_gradients,
    check_gradients_of_forward,
    check_jvp,
    check_packed,
)
from helpers.compare import assert_bitwise
from helpers.data import Case, Emulation, inputs
from helpers.derivatives import KINDS, tangents
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES
from helpers.kernels import small_problem

KERNELS = [EMULATED, CUPY]
LENGTHS = {"emulated": (37, 50), "cupy": (203, 1113)}


def case_of(backend, dtype, head_dims=(257, 40), **changes):
    """Return a case of several tiles, whose lengths no tile divides."""
    lengths = LENGTHS[backend.name]
    return Case(dtype, 1, *lengths, 2, 1, *head_dims, seed=512, **changes)


def check(backend, case):
    check_forward(backend, case)
    check_gradients(backend, case)


@on_kernels_of(
    dtype=DTYPES,
    head_dims=[(257, 257), (576, 512), (320, 320), (576, 64)],
    causal=[True, False],
)
def test_head_dims(backend, dtype, head_dims, causal):
    check(backend, case_of(backend, dtype, head_dims, causal=causal))


@on_kernels
@pytest.mark.parametrize(
    ("arch", "head_dims"), [("sm_80", (512, 384)), ("sm_90a", (257, 257))]
)
def test_register_tiles(backend, arch, head_dims):
    """Where float32 has register tiles for both directions."""
    d, dv = head_dims
    for direction in ("forward", "backward"):
        problem = small_problem(direction, "float32", d, head_dim_v=dv)
        assert plan(problem, device_of_arch(arch)).family == "fma"
    on = Emulation(arch)
    check(backend, case_of(backend, "float32", head_dims, causal=True, on=on))


@on_kernels
@pytest.mark.parametrize(
    ("arch", "head_dims"),
    [("sm_86", (512, 512)), ("sm_80", (512, 384)), ("sm_90a", (320, 512))],
)
def test_tensor_cores(backend, arch, head_dims):
    """Tiles of as much shared memory as each has, of few rows and keys."""
    on = Emulation(arch)
    more = {"causal": True, "window": (30, 10), "on": on}
    check(backend, case_of(backend, "bfloat16", head_dims, **more))


@st.composite
def optional_cases(draw, backend, kind):
    """Draw a call with options, on machines with a tensor-core family."""
    case = draw(strategies.optional_cases(
        backend, dims=strategies.WIDE_HEAD_DIMS, longest=70, **KINDS[kind]
    ))  # fmt: skip
    archs = ["sm_80", "sm_90a", "sm_86"]
    on = replace(case.on, forward_tile=None, backward_tile=None,
                 arch=draw(st.sampled_from(archs)))  # fmt: skip
    return replace(case, on=on, block_q=None, block_k=None)


@on_each_backend(optional_cases, each={"kind": KINDS}, backends=KERNELS)
def test_every_direction(backend, case):
    """Forward, backward, jvp and double_backward, of each family."""
    check(backend, case)
    direction = tangents(case)
    check_jvp(backend, case, direction)
    check_double_backward(backend, case, direction)


@on_kernels
def test_a_weight_of_one_is_exact_in_parts(backend):
    """Warps' parts of a score: one key outweighs all, so out is its value."""
    case = case_of(backend, "float64", (257, 40), on=Emulation("sm_90a"))
    q, k, v, _ = inputs(case)
    for i in range(case.seqlen_q):
        q[:, i] = 40 * k[:, i % case.seqlen_k]
    out, _ = calls.forward(backend, case, q, k, v)
    assert_bitwise(out, np.repeat(v[:, : case.seqlen_q], 2, axis=2), "out")


@on_each_backend(
    strategies.cases,
    dtypes=("bfloat16",),
    dims=strategies.WIDE_HEAD_DIMS,
    archs=("sm_86",),
    longest=100,
)
def test_is_the_gradient_of_forward(backend, case):
    check_gradients_of_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("layout", ["misaligned", "every_other_element"])
def test_rows_anywhere(backend, layout):
    """16-bit rows that delta cannot read 16 bytes at a time."""
    check(backend, case_of(backend, "bfloat16", causal=True, layout=layout))


OPTIONS = {
    "few": {
        "window": (20, 10),
        "arrays_of": ("segment_ids_k", "segment_ids_q", "sink"),
        "causal": True,
    },
    "all": {
        "window": (30, 30),
        "softcap": 30.0,
        "dropout": 0.5,
        "arrays_of": (
            "alibi_slopes_of_batches", "bias", "mask", "segment_ids_k",
            "segment_ids_q", "sink",
        ),
    },
}  # fmt: skip


@on_kernels_of(dtype=["float16", "bfloat16"], name=["few", "all"])
def test_options(backend, dtype, name):
    check(backend, case_of(backend, dtype, **OPTIONS[name]))


@on_kernels
def test_packed_sequences(backend):
    """A sequence without queries, one without keys, unused tokens."""
    case = Case(
        "float16", seqlen_q=80, seqlen_k=90, num_heads_q=2, head_dim=40,
        head_dim_v=257, causal=True, arrays_of=("sink",),
        offsets=((0, 30, 30, 50, 70), (0, 40, 60, 60, 80)),
    )  # fmt: skip
    check_packed(backend, case)


@on_kernels
def test_masked_nan_does_not_spread(backend):
    """NaN in a query and its dout, in a key and its value."""
    case = case_of(backend, "bfloat16", causal=True)
    late = case.seqlen_k - 5  # the last five queries see it
    places = {"q": 3, "dout": 3, "k": late, "v": late}
    spoiled = tuple((x, (0, i), "nan") for x, i in places.items())
    case = replace(case, spoiled=spoiled)
    check_forward(backend, case)
    got = check_gradients(backend, case)
    assert 0 < np.isnan(np.float32(got[0])).mean() < 0.2  # of dq


@on_kernels
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dims", [(193, 193), (40, 256)])
def test_doubles_of_193_to_256_columns(backend, arch, head_dims):
    """Warps sum parts of scores, as of wider heads."""
    case = case_of(
        backend, "float64", head_dims, causal=True, on=Emulation(arch)
    )
    check(backend, case)


@pytest.mark.parametrize("backend", [EMULATED])
def test_gradients_are_the_same_in_every_run(backend):
    """On simt, as on sm_75: one block writes each element."""
    on = Emulation("sm_75")
    case = case_of(backend, "float64", causal=True, on=on)
    arrays = inputs(case)
    first = calls.gradients(backend, case, *arrays)
    other = replace(case, on=replace(on, seed=1, resident=3))
    again = calls.gradients(backend, other, *arrays)
    for x, a, b in zip("qkv", again, first, strict=True):
        assert_bitwise(a, b, f"d{x}")
