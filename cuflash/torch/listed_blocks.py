"""Whether what a BlockMask of PyTorch's lists follows from its mask_mod.

If so, calls need no table of its blocks: the mask may read nothing then, or be
one that a built-in option computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cuflash.expressions import nodes
from cuflash.expressions.intervals import ALL, NONE, Extremes, Intervals
from cuflash.expressions.nodes import Node

from . import functions
from .compiled_functions import Blocks
from .function_keys import key_of
from .tracing import PLAIN

# Larger tables are not looked at, which takes the host some ms.
_MOST_BLOCKS = 2**18


def key_if_implied(blocks: Blocks, lengths: tuple[int, int]) -> object:
    """The key of a mask_mod that implies all that is listed; None otherwise.

    Another one later, `key_of(mask_mod).value`, says that the function may
    have changed. One that reads a tensor may change unseen, and implies
    nothing. The table comes to the host, which waits for it.
    """
    key = key_of(blocks.mask_mod)
    if key.value is None or key.tensors or not _is_readable(blocks.table):
        return None
    found = functions.taken({"mask_mod": blocks.mask_mod}, {}, None)
    assert found is not None
    graph = dict(found.graphs.roots)["mask_mod"]
    listed = blocks.table.cpu().numpy()
    whole = all(x.kind != "real" for x in nodes.in_order([graph]))
    for axis, name in enumerate(("b", "h")):
        whole &= name not in graph.depends or listed.shape[axis] > 1
    if not whole:  # reals have the calls' dtypes
        return None
    left = _visibility(graph, listed.shape, lengths, blocks.size[:2])
    none, every = listed == 0, listed == 2
    disagrees = (none & (left != NONE)) | (every & (left != ALL))
    return None if disagrees.any() else key.value


def _is_readable(table: torch.Tensor) -> bool:
    if table.numel() > _MOST_BLOCKS or type(table) not in PLAIN:
        return False
    if torch._C._len_torch_dispatch_stack() or table.is_meta:
        return False
    return not is_captured(table)


def is_captured(x: torch.Tensor) -> bool:
    """Whether a CUDA graph records what is done with it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _visibility(
    graph: Node,
    shape: tuple[int, ...],
    lengths: tuple[int, int],
    size: tuple[int, int],
) -> Any:
    """What a mask leaves of each block: NONE, ALL, or else it is unknown."""
    axes = [*np.ogrid[tuple(map(slice, shape))]]
    ends: dict[Node, tuple[Any, Any]] = {}
    for i, name in enumerate(nodes.INDICES):
        first = last = axes[i]
        if i >= 2:
            first = first * size[i - 2]
            last = np.minimum(first + size[i - 2], lengths[i - 2]) - 1
        ends[nodes.index(name)] = first, last
    for name, length in zip(nodes.LENGTHS, lengths, strict=True):
        ends[nodes.index(name)] = np.int64(length), np.int64(length)
    found = Intervals(ends, (), np.float32, Extremes(()))
    return found.visibility(graph)
