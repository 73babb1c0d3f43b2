"""What is remembered of functions keeps none of their tensors."""

import functools
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from torch.nn.attention import flex_attention as theirs  # noqa: E402

from cuflash.torch import create_block_mask, flex_attention  # noqa: E402
from cuflash.torch.function_keys import key_of  # noqa: E402

pytestmark = pytest.mark.slow

QKV = [torch.ones(1, 2, 4, 8)] * 3


def closure(table):
    return {"score_mod": lambda s, b, h, i, j: s + table[h]}


def of_its_module(table):
    module = torch.nn.Module()
    module.table = torch.nn.Parameter(table)
    module.score = lambda s, b, h, i, j: s + module.table[h]
    return {"score_mod": module.score}


class Biased:
    def __init__(self, table):
        self.table = table

    def __call__(self, s, b, h, i, j):
        return s + self.table[h]

    method = __call__


def block_mask(module):
    def made(table):
        mask_mod = lambda b, h, i, j: table[h] < 2  # noqa: E731
        mask = module.create_block_mask(
            mask_mod, None, None, 4, 4, device="cpu"
        )
        mask_mod.owner = mask
        return {"block_mask": mask}

    return made


class Ours:
    create_block_mask = staticmethod(create_block_mask)


MADE = {
    "closure": closure,
    "of its module": of_its_module,
    "callable": lambda x: {"score_mod": Biased(x)},
    "method": lambda x: {"score_mod": Biased(x).method},
    "ours": block_mask(Ours),
    "theirs": block_mask(theirs),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_end_with_their_functions(name):
    alive = []
    for _ in range(3):
        table = torch.ones(2)
        flex_attention(*QKV, **MADE[name](table))
        alive.append(weakref.ref(table))
        del table
    gc.collect()
    assert [x() for x in alive] == [None] * 3


@pytest.mark.parametrize("name", ["closure", "callable", "method"])
def test_tensors_of_closures_end_at_once(name):
    """Memory of a device cannot wait for the collector."""
    gc.disable()
    try:
        table = torch.ones(2)
        flex_attention(*QKV, **MADE[name](table))
        alive = weakref.ref(table)
        del table
        assert alive() is None
    finally:
        gc.enable()


def test_copies_of_functions_have_no_key():
    """cloudpickle copies what stands in a function's `__dict__`."""
    score = closure(torch.ones(2))["score_mod"]
    flex_attention(*QKV, score)
    assert [*pickle.loads(pickle.dumps(score.__dict__)).values()] == [None]

    @functools.wraps(score)
    def doubled(*args):
        return 2 * score(*args)

    assert doubled.__dict__["__cuflash_key__"].of() is score
    got = key_of(doubled)
    assert got.of() is doubled and got is key_of(doubled)
