"""dlse, the gradient of a loss that depends on lse too."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import strategies
from helpers import calls, expected
from helpers.backends import on_backends, on_kernels
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_bitwise,
    assert_finite,
    assert_gradients_match,
)
from helpers.data import SIMT, Case, Emulation, inputs, lse_gradient
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES
from helpers.option_cases import FAMILIES
from helpers.packed import assert_packed_gradients, packed_inputs

# A case of each family of kernels, by name.
OF_FAMILY = {
    "wgmma": Case("bfloat16", 2, 70, 90, 2, 1, 40, 24, causal=True,
                  on=Emulation("sm_90a")),
    "wide wgmma": Case("float16", 1, 70, 80, 2, 1, 200, 160, causal=True,
                       on=Emulation("sm_90a")),
    "wgmma by passes": Case("float16", 1, 70, 80, 2, 1, 300, 260, causal=True,
                            on=Emulation("sm_90a")),
    "wgmma of whole heads": Case("float16", 1, 130, 190, 2, 2, 64, 64,
                                 causal=True,
                                 on=Emulation("sm_90a", num_sms=2)),
    "mma": Case("float16", 2, 70, 90, 2, 1, 40, 24, causal=True),
    "fma": Case("float32", 2, 70, 90, 2, 1, 40, 24, causal=True),
    "simt": Case("float32", 2, 70, 90, 2, 1, 40, 24, causal=True,
                 on=SIMT),
    "dmma": Case("float64", 2, 70, 90, 2, 1, 40, 24, causal=True),
    "tf32x3": Case("float32", 2, 70, 90, 2, 1, 40, 24, causal=True,
                   precision="tf32x3"),
}  # fmt: skip
of_each_family = pytest.mark.parametrize("family", OF_FAMILY)


def gradients(backend, case, dlse):
    """Return what backward gives, and what it should give."""
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, **case.meaning(), return_lse=True)
    placed = backend.place(dlse)
    got = calls.backward(backend, case, dout, q, k, v, out, lse, dlse=placed)
    want = expected.backward(dout, q, k, v, dlse=dlse, **case.meaning())
    return got, want


def check(backend, case):
    got, want = gradients(backend, case, lse_gradient(case))
    assert_gradients_match(got, want, case)


@on_each_backend(
    strategies.cases, each={"dtype": DTYPES}, archs=strategies.FAMILIES
)
def test_is_the_gradient(backend, case):
    check(backend, case)


@on_each_backend(strategies.optional_cases)
def test_is_the_gradient_with_options(backend, case):
    check(backend, case)


@on_kernels
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("wgmma", "grouped"), ("bfloat16", "several"), ("fma", "small"),
        ("dmma", "several"), ("tf32x3", "several"), ("simt64", "several"),
    ],
)  # fmt: skip
def test_is_the_gradient_with_all_options(backend, family, shape):
    check(backend, FAMILIES[family].case(shape, "all"))


@on_each_backend(strategies.packed_cases, archs=strategies.FAMILIES)
def test_is_the_gradient_of_packed_sequences(backend, case):
    check_packed(backend, case)


@on_kernels
@pytest.mark.parametrize("arrays_of", [(), ("sink",)])
@of_each_family
def test_packed_sequences_of(backend, family, arrays_of):
    offsets = (0, 20, 20, 60), (0, 40, 50, 75)
    check_packed(backend, replace(
        OF_FAMILY[family], batch=1, offsets=offsets, arrays_of=arrays_of
    ))  # fmt: skip


@on_kernels
@of_each_family
def test_nan_reaches_its_row_of_a_packed_sequence(backend, family):
    offsets = (0, 20, 60), (0, 30, 75)
    case = replace(OF_FAMILY[family], batch=1, offsets=offsets)
    dlse = lse_gradient(case)
    dlse[0, 1, 40] = np.nan
    check_packed(backend, case, dlse)


def check_packed(backend, case, dlse=None):
    (q, k, v, dout), given = packed_inputs(case)
    out, lse = cuflash.forward(*given[:3], **case.meaning(), return_lse=True)
    dlse = lse_gradient(case) if dlse is None else dlse
    got = calls.backward(
        backend, case, given[3], *given[:3], out, lse,
        dlse=backend.place(dlse[0]),
    )  # fmt: skip
    assert_packed_gradients(got, dout, q, k, v, case, dlse)


@on_backends
@of_each_family
def test_zero_gives_the_bits_of_none(backend, family):
    case = replace(OF_FAMILY[family], deterministic=True)
    q, k, v, dout = inputs(case)
    given = dout, q, k, v, *calls.states(case, q, k, v)
    dlse = backend.place(np.zeros_like(given[-1]))
    zero = calls.backward(backend, case, *given, dlse=dlse)
    none = calls.backward(backend, case, *given)
    for name, a, b in zip(("dq", "dk", "dv"), zero, none, strict=True):
        assert_bitwise(a, b, name)


@on_backends
@of_each_family
def test_any_strides(backend, family):
    """Another order of axes, gaps, the other byte order."""
    case = replace(OF_FAMILY[family], deterministic=True)
    dlse = lse_gradient(case)
    gaps = np.full((*dlse.shape, 2), np.nan, dlse.dtype)
    gaps[..., 1] = dlse
    plain, _ = gradients(backend, case, dlse)
    given = [np.asfortranarray(dlse), gaps[..., 1]]
    if backend.name != "cupy":  # which has native bytes alone
        given.append(dlse.astype(dlse.dtype.newbyteorder()))
    for x in given:
        got, _ = gradients(backend, case, x)
        for name, a, b in zip(("dq", "dk", "dv"), got, plain, strict=True):
            assert_bitwise(a, b, name)


@on_backends
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@of_each_family
def test_what_is_not_finite_reaches_its_row(backend, family, bad):
    """Its dq, and dk of the keys that it sees; no dv."""
    case = OF_FAMILY[family]
    dlse = lse_gradient(case)
    dlse[0, 1, 30] = bad
    (dq, dk, dv), want = gradients(backend, case, dlse)
    assert_gradients_match((dq, dk, dv), want, case, kinds=False)
    assert_finite(dv, "dv", case)


@on_backends
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("window", [(None, None), (9, 0)])
@of_each_family
def test_rows_that_see_nothing_give_nothing(backend, family, window, bad):
    case = replace(OF_FAMILY[family], seqlen_q=90, seqlen_k=70, window=window)
    dlse = lse_gradient(case)
    _, want = gradients(backend, case, dlse)
    dlse[..., :20] = bad
    got, _ = gradients(backend, case, dlse)
    assert_gradients_match(got, want, case)


@on_backends
@pytest.mark.parametrize(
    ("also", "offsets"),
    [((), None), (("bias", "mask"), None), ((), ((0, 20, 50), (0, 0, 0)))],
)
@of_each_family
def test_a_sink_without_keys(backend, family, also, offsets):
    """lse is the sink: dsink is the sum of dlse.

    Whatever the scale: 0 times the maximum of no scores is NaN.
    """
    case = replace(OF_FAMILY[family], batch=1 if offsets else 2, seqlen_k=0,
                   arrays_of=("sink", *also), offsets=offsets,
                   scale=0.0)  # fmt: skip
    arrays, dlse = inputs(case), np.abs(lse_gradient(case))
    if offsets:
        arrays, dlse = [x[0] for x in arrays], dlse[0]
        dlse[:, 50:] = 0  # of no sequence
    *inputs_, dout = arrays
    given = dout, *inputs_, *calls.forward(backend, case, *inputs_)
    dq, *_, got = calls.backward(
        backend, case, *given, dlse=backend.place(dlse)
    )
    assert got.dtype == dlse.dtype
    assert_all(dq, 0, "dq", case)
    heads = 0 if offsets else 1
    want = np.moveaxis(dlse, heads, 0).reshape(len(got), -1).astype(np.float64)
    # At most 140 additions, by NumPy in the result's dtype and by kernels in
    # float64, then one rounding.
    sums = got.dtype if backend.name == "numpy" else np.float64
    most = 140 * np.finfo(sums).eps / 2 + np.finfo(got.dtype).eps
    assert_allclose(got, want.sum(1), "got", rtol=most)


MERGE_ERROR = 1e-12  # sums of 70 terms of about 1, a chain of ten: 1e-13


@on_backends
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_a_merge_is_trained_through(backend, arch):
    """The derivative is explained in reference/test_reference_dlse.py."""
    case = Case("float64", 2, 50, 70, 2, 1, 24, 40, on=Emulation(arch))
    q, k, v, dout = inputs(case)
    halves = [(k[:, i], v[:, i]) for i in (slice(30), slice(30, None))]
    states = [calls.forward(backend, case, q, *half) for half in halves]
    out, lse = calls.merge_states(backend, case, *states[0], *states[1])
    parts = []
    for half, (part, part_lse) in zip(halves, states, strict=True):
        w = np.exp(part_lse - lse)
        of_lse = w * (dout * (part - out)).sum(-1).swapaxes(1, 2)
        of_out = w.swapaxes(1, 2)[..., None] * dout
        parts.append(
            calls.backward(
                backend, case, of_out, q, *half, part, part_lse,
                dlse=backend.place(of_lse),
            )
        )  # fmt: skip
    (dq, *first), (more, *second) = parts
    pairs = zip(first, second, strict=True)
    got = dq + more, *(np.concatenate(x, axis=1) for x in pairs)
    want = calls.backward(backend, case, dout, q, k, v, out, lse)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        most = MERGE_ERROR * np.linalg.norm(b)
        assert np.linalg.norm(a - b) <= most, name


LOSS_STEP, LOSS_ERROR = 2.0**-17, 1e-7  # as in test_gradcheck.py


@on_backends
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_gradients_are_derivatives(backend, arch):
    """Of sum(dout * out) + sum(dlse * lse), by central differences."""
    case = Case("float64", 2, 19, 23, 4, 2, 16, 24, causal=True,
                on=Emulation(arch))  # fmt: skip
    *arrays, dout = inputs(case)
    dlse = lse_gradient(case)
    given = dout, *arrays, *calls.forward(backend, case, *arrays)
    got = calls.backward(backend, case, *given, dlse=backend.place(dlse))
    rng = np.random.default_rng(1)
    for which, gradient in enumerate(got):
        direction = rng.standard_normal(gradient.shape)
        losses = []
        for step in (LOSS_STEP, -LOSS_STEP):
            moved = list(arrays)
            moved[which] = arrays[which] + step * direction
            out, lse = calls.forward(backend, case, *moved)
            losses.append((dout * out).sum() + (dlse * lse).sum())
        slope = (losses[0] - losses[1]) / (2 * LOSS_STEP)
        most = LOSS_ERROR * np.linalg.norm(gradient)
        assert abs((gradient * direction).sum() - slope) <= most
