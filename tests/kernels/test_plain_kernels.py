"""Calls without options run kernels without a trace of options.

The headers of options are replaced by twins without options, in which
functions that only options call have no body. The machine code must not
change.
"""

from functools import partial

import pytest

from cuflash.build import nvrtc, source
from helpers.kernels import kernels
from helpers.machine_code import instructions
from helpers.small_kernels import KERNELS as CUDA

TWINS = source.kernel_files(CUDA / "without_options")

CALLS = [
    ("forward", "bfloat16", "sm80", 64),
    ("backward", "bfloat16", "sm80", 64),
    ("forward", "float32", "simt", 32),
    ("backward", "float32", "simt", 32),
    ("forward", "float32", "decode_simt", 64),
    ("forward", "float64", "decode_simt", 64),
    ("forward", "float32", "fma", 64),
    ("backward", "float32", "fma", 64),
    ("forward", "float64", "mma8_float64", 64),
    ("backward", "float64", "mma8_float64", 64),
    ("forward", "float32", "mma8_float32", 64),
    ("backward", "float32", "mma8_float32", 128),
    ("forward", "bfloat16", "sm90", 64),
    ("forward", "bfloat16", "sm90", 128),
    ("backward", "bfloat16", "sm90", 64),
    ("backward", "bfloat16", "sm90", 128),
    ("backward", "bfloat16", "sm90", 256),  # sm90/backward_cluster.cu
]


@pytest.mark.parametrize(
    ("direction", "dtype", "family", "head_dim", "causal"),
    [(*call, i % 2 == 1) for i, call in enumerate(CALLS)],
)
def test_options_leave_no_trace(
    direction, dtype, family, head_dim, causal, monkeypatch
):
    arch = "sm_90a" if family == "sm90" else "sm_80"
    planned = kernels(direction, dtype, arch, head_dim, family, causal=causal)
    got = [instructions(kernel, arch) for kernel in planned]
    without = partial(source.build, twins=TWINS)
    monkeypatch.setattr(nvrtc.source, "build", without)
    assert got == [instructions(kernel, arch) for kernel in planned]


def test_each_twin_replaces_a_kernel_file():
    assert TWINS and TWINS.keys() <= source.kernel_files().keys()


def test_an_option_leaves_one():
    plain, capped = (
        kernels("forward", "float32", "sm_80", 32, "simt", softcap=cap)[-1]
        for cap in (0.0, 30.0)
    )
    assert instructions(plain, "sm_80") != instructions(capped, "sm_80")
