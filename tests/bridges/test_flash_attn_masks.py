"""Which keys a query sees, as flash-attn's README draws and defines it."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_oracle import mask  # noqa: E402

from cuflash.flash_attn import flash_attn_func  # noqa: E402
from helpers.compare import (  # noqa: E402
    assert_all,
    assert_arrays_equal,
    assert_finite,
)

pytestmark = pytest.mark.slow


def seen(seqlen_q, seqlen_k, **options):
    """The weights that are not 0: scores are 0, and v is the identity."""
    q = torch.zeros(1, seqlen_q, 1, 8)
    k = torch.zeros(1, seqlen_k, 1, 8)
    v = torch.eye(seqlen_k)[None, :, None]
    return flash_attn_func(q, k, v, **options)[0, :, 0] > 0


def test_the_first_example_of_a_causal_mask():
    assert seen(2, 5, causal=True).tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_the_second_example_of_a_causal_mask():
    assert seen(5, 2, causal=True).tolist() == [
        [0, 0],
        [0, 0],
        [0, 0],
        [1, 0],
        [1, 1],
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [(-1, -1), (2, 0), (0, 2), (3, -1), (-1, 1)]
)
@pytest.mark.parametrize("seqlens", [(6, 6), (3, 7), (7, 3), (1, 9)])
def test_windows(seqlens, window, causal):
    got = seen(*seqlens, causal=causal, window_size=window)
    assert_arrays_equal(got, mask(*seqlens, causal, window), "got")


@pytest.mark.parametrize("window", [[1, 2], torch.tensor([1, 2]), (1, None)])
def test_forms_of_a_window(window):
    right = -1 if window[1] is None else 2
    assert_arrays_equal(
        seen(5, 6, window_size=window), mask(5, 6, False, (1, right)), "seen"
    )


@pytest.mark.parametrize("window", [None, torch.tensor([-1, -1]), (-7, -2)])
def test_forms_of_no_window(window):
    assert_all(seen(3, 4, window_size=window), True, "seen")


def test_a_query_without_keys_has_out_0_and_lse_minus_infinity():
    q, k = torch.ones(1, 5, 1, 8), torch.ones(1, 2, 1, 8)
    out, lse, none = flash_attn_func(
        q, k, k, causal=True, return_attn_probs=True
    )
    assert_all(out[0, :3], 0, "out[0, :3]")
    assert_all(lse[0, 0, :3], -torch.inf, "lse[0, 0, :3]")
    assert_finite(lse[0, 0, 3:], "lse[0, 0, 3:]")
    assert none is None
