"""Block masks of PyTorch's whose blocks follow from their mask_mod."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from torch.nn.attention import flex_attention as theirs  # noqa: E402

from cuflash.torch import block_mask as block_masks  # noqa: E402
from cuflash.torch import create_block_mask, flex_attention  # noqa: E402
from cuflash.torch.block_mask import mask_of  # noqa: E402
from helpers.compare import assert_bitwise  # noqa: E402

pytestmark = pytest.mark.slow

IDS = torch.arange(40) // 7
LIMIT = 9


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i >= j) & (i - j <= 20)


def prefix(b, h, i, j):
    return (j < 5) | (i >= j + h)


IMPLIED = {"causal": causal, "window": window, "prefix": prefix}
# What a tensor holds may change; reals are rounded as a call's; the blocks of
# batch element 0 are listed for all; intervals leave tiles undecided.
OTHERS = {
    "documents": lambda b, h, i, j: IDS[i] == IDS[j],
    "reals": lambda b, h, i, j: j / 3.0 < 4.1,
    "batch": lambda b, h, i, j: j >= 20 * b,
    "squares": lambda b, h, i, j: (i - j) * (i - j) + 1 < 0,
}


def block_mask(mask_mod, length, heads=None):
    sizes = None, heads, length, length
    return theirs.create_block_mask(
        mask_mod, *sizes, device="cpu", BLOCK_SIZE=16
    )


def is_implied(mask, length):
    found = mask_of(mask, (2, 2, length, length))
    return found.snapshot.mask_mod is mask.mask_mod


@pytest.mark.parametrize("length", [31, 32, 33])
@pytest.mark.parametrize("name", IMPLIED)
def test_they_need_no_table(name, length):
    heads = 2 if name == "prefix" else None
    mask = block_mask(IMPLIED[name], length, heads)
    assert is_implied(mask, length)
    qkv = torch.randn(3, 2, 2, length, 8, dtype=torch.float64)
    own = create_block_mask(IMPLIED[name], None, heads, length, length)
    got, expected = (
        flex_attention(*qkv, block_mask=x).numpy() for x in (mask, own)
    )
    assert_bitwise(got, expected, "out")
    mask.kv_num_blocks.zero_()  # it lists less than the mask_mod leaves
    assert not is_implied(mask, length)


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_one(name):
    assert not is_implied(block_mask(OTHERS[name], 33), 33)


def test_a_mask_of_inference_mode_is_not_looked_at():
    """It would be in each call: nobody counts its changes."""
    with torch.inference_mode():
        assert not is_implied(block_mask(causal, 33), 33)


def test_a_function_that_changes_later(monkeypatch):
    """Of its blocks those stay that are listed."""

    def near(b, h, i, j):
        return i - j <= LIMIT

    mask, value = block_mask(near, 40), torch.eye(40).expand(1, 1, 40, 40)
    assert is_implied(mask, 40)
    monkeypatch.setitem(globals(), "LIMIT", 38)
    assert not is_implied(mask, 40)
    zeros = torch.zeros(1, 1, 40, 8)
    out = flex_attention(zeros, zeros, value, block_mask=mask)
    assert out[0, 0, 39, 0] == 0  # its block is hidden
    assert out[0, 0, 31, 0] > 0  # its block was cut


def test_the_host_waits_once(monkeypatch):
    """For partial functions and objects, too, and where a dict changes."""

    class Near:
        reach = 5

        def __call__(self, b, h, i, j):
            return i - j < self.reach

    numbers = {"reach": 5, "step": 0}
    near = {
        "partial": functools.partial(lambda n, b, h, i, j: i - j < n, 5),
        "object": Near(),
        "a dict": lambda b, h, i, j: i - j < numbers["reach"],
    }
    looks, look = [], block_masks.key_if_implied
    monkeypatch.setattr(
        block_masks, "key_if_implied",
        lambda *x: looks.append(x) or look(*x),
    )  # fmt: skip
    for name, mask_mod in near.items():
        mask = block_mask(mask_mod, 40)
        looks.clear()
        for numbers["step"] in range(3):
            assert is_implied(mask, 40) or name == "a dict"
        assert len(looks) == 1, name


def test_a_table_that_a_graph_records_is_not_kept(monkeypatch):
    mask = block_mask(causal, 40)
    for recorded in (True, False):
        monkeypatch.setattr(
            block_masks, "is_captured", lambda x, found=recorded: found
        )
        mask_of(mask, (2, 2, 40, 40))
        assert (block_masks._KNOWN in vars(mask)) is not recorded
