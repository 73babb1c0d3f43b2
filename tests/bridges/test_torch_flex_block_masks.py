"""Block masks: what calls share, what they take."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from torch_data import assert_equal  # noqa: E402

from cuflash.errors import DTypeError, UnsupportedError  # noqa: E402
from cuflash.torch import (  # noqa: E402
    attention,
    create_block_mask,
    flex_attention,
    functions,
)

pytestmark = pytest.mark.slow

QKV = [torch.ones(1, 4, 1, 8)] * 3


def made(mask_mod):
    return create_block_mask(mask_mod, None, None, 4, 4)


def within(b, h, q_idx, kv_idx, *, width):
    return q_idx - kv_idx < width


def kept(mask, **numbers):
    options = {"mask_mod": mask, "mod_arrays": numbers}
    return functions.taken(options, {}, QKV[0]).kept


def test_what_a_mask_of_other_numbers_leaves_is_not_shared():
    mask = made(within)
    first = kept(mask, width=2)
    assert kept(mask, width=2) is first
    for width in (9, True, 2.0):
        assert kept(mask, width=width) is not first


def test_numbers_of_the_score_alone_change_nothing():
    mask = made(lambda b, h, i, j: i >= j)

    def taken(rate):
        def score(s, b, h, i, j, *, rate):
            return s * rate

        options = {"mask_mod": mask, "score_mod": score}
        options["mod_arrays"] = {"rate": rate}
        return functions.taken(options, {}, QKV[0]).kept

    assert taken(0.5) is taken(2.0) is not None


def test_tensors_whose_changes_are_not_counted():
    with torch.inference_mode():
        ids = torch.zeros(4)
        mask = made(lambda b, h, i, j: ids[i] == ids[j])
        assert kept(mask) is None
    ids = torch.zeros(4)
    first = kept(mask := made(lambda b, h, i, j: ids[i] == ids[j]))
    assert kept(mask) is first is not None
    ids.data = torch.ones(4)
    assert kept(mask) is not first


def test_a_mask_mod_that_is_assigned_later():
    mask = made(lambda b, h, i, j: i >= j)
    value = torch.arange(32.0).reshape(1, 1, 4, 8)
    query = torch.zeros_like(value)
    flex_attention(query, query, value, block_mask=mask)
    mask.mask_mod = lambda b, h, i, j: j == 1
    got = flex_attention(query, query, value, block_mask=mask)
    assert_equal([got], [value[:, :, 1:2].expand_as(got)])
    assert attention(*QKV, mask_mod=mask).shape == QKV[0].shape


@pytest.mark.parametrize("mask", [3, (1, 2), "x", [1], np.ones((2, 2))])
def test_what_is_no_block_mask(mask):
    query = torch.ones(1, 1, 4, 8)
    with pytest.raises(DTypeError, match="what create_block_mask returns"):
        flex_attention(query, query, query, block_mask=mask)


def test_arguments_of_create_block_mask():
    sizes = None, None, 4, 4
    create_block_mask(within, *sizes, separate_full_blocks=False)
    with pytest.raises(UnsupportedError, match="bogus is no argument"):
        create_block_mask(within, *sizes, bogus=1)
