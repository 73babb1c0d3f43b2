"""sm90/backward_cluster.cu: head dimensions to 256, blocks of a cluster."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.plans.plan import device_of_arch, plan
from helpers import calls
from helpers.backends import EMULATED, on_kernels
from helpers.checks import check_gradients
from helpers.compare import assert_bitwise
from helpers.data import Case, Emulation, inputs
from helpers.kernels import small_problem
from helpers.option_cases import sizes

# One cluster, which takes one pair of key tiles after another.
CAUSAL = Case(
    "float16", **sizes(1, 70, 200, 4, 2, 256, 256, causal=True),
    on=Emulation("sm_90a", num_sms=2, seed=1),
)  # fmt: skip
on_emulator = pytest.mark.parametrize("backend", [EMULATED])


@on_kernels
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 65), (63, 128), (64, 66), (65, 129), (70, 66)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_edges_of_tiles(backend, seqlen_q, seqlen_k, causal):
    """A pair without a second tile; queries that see no key."""
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    check_gradients(
        backend, replace(CAUSAL, **lengths, causal=causal, num_heads_q=2)
    )


@on_kernels
@pytest.mark.parametrize("values", ["rising", "punishing"])
def test_weights_of_one_key(backend, values):
    check_gradients(backend, replace(CAUSAL, values=values, batch=2))


@on_kernels
@pytest.mark.parametrize("seed", range(4))
def test_blocks_in_any_order(backend, seed):
    on = Emulation("sm_90a", num_sms=4, seed=seed, resident=2)
    check_gradients(backend, replace(CAUSAL, dtype="bfloat16", on=on))


@on_emulator
@pytest.mark.parametrize("causal", [True, False])
def test_the_same_bits_in_every_order(backend, causal):
    """As deterministic, by clusters that wait for one another."""
    # Sections of one key head: all but the last two begin with the last keys.
    of_head = {"num_heads_q": 4, "num_heads_kv": 4}
    case = replace(CAUSAL, causal=causal, deterministic=True, **of_head)
    arrays = inputs(case)
    runs = []
    for seed in (1, 2):
        on = Emulation(
            "sm_90a", num_sms=4, seed=seed, resident=2, l2_bytes=1024
        )
        runs.append(calls.gradients(backend, replace(case, on=on), *arrays))
    for x, a, b in zip("qkv", *runs, strict=True):
        assert_bitwise(a, b, f"d{x}")
    check_gradients(backend, case)


@on_emulator
def test_sections_that_begin_with_the_last_keys(backend):
    """Pairs whose predecessor does not visit their first query tiles."""
    on = Emulation("sm_90a", num_sms=4, resident=2, l2_bytes=1)
    sections = sizes(1, 150, 260, 6, 3, 256, 256, causal=True)
    check_gradients(
        backend, replace(CAUSAL, **sections, deterministic=True, on=on)
    )


@on_kernels
def test_masked_nan_does_not_spread(backend):
    """NaN in a query and its dout, in a key and its value."""
    # In different heads: those queries would spoil all gradients of the key's.
    late = CAUSAL.seqlen_k - 5  # the last five queries see it
    places = {"q": (3, 2), "dout": (3, 2), "k": (late, 0), "v": (late, 0)}
    spoiled = tuple((x, (0, *at, 250), "nan") for x, at in places.items())
    got = check_gradients(backend, replace(CAUSAL, spoiled=spoiled))
    assert 0 < np.isnan(np.float32(got[0])).mean() < 0.2  # of dq


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "cluster"),
        ({"dlse": True}, "cluster"),
        ({"softcap": 2.0}, "wide"),
        ({"seqlen_k": 64}, "wide"),
    ],
)
def test_which_calls_run_it(changes, kernel):
    problem = small_problem("backward", "float16", 256, **changes)
    decided = plan(problem, device_of_arch("sm_90a"))
    assert f"sm90/backward_{kernel}.cu" in [x.file for x in decided.kernels]
