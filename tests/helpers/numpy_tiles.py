"""Small tiles for calls on NumPy arrays, whose own are 256 by 512."""

from contextlib import ExitStack, contextmanager
from unittest import mock

from cuflash.backends.numpy import picked, scores


@contextmanager
def small_tiles(block_q=16, block_k=8):
    """Cut pairs into small tiles, and heads into steps of one."""
    sizes = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "PAIRS": 1}
    with ExitStack() as stack:
        for module in (picked, scores):
            stack.enter_context(mock.patch.multiple(module, **sizes))
        yield
