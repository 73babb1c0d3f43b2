"""Keys that a model's indexer chooses for each query, as boolean masks.

Kernels test such a mask pair by pair. It skips no tiles, as nothing is known
about it in advance, and takes seqlen_q * seqlen_k bytes.
"""

from __future__ import annotations

import torch


def chosen_keys(indices: torch.Tensor, num_keys: int) -> torch.Tensor:
    """A mask of the keys that are named by their indices.

    Parameters
    ----------
    indices : Tensor, (batch, seqlen_q, n)
        Below 0 is none.
    num_keys : int

    Returns
    -------
    Tensor, (batch, 1, seqlen_q, num_keys)
    """
    indices = indices.long().unsqueeze(1)
    indices = torch.where(indices < 0, num_keys, indices)  # none
    shape = (*indices.shape[:-1], num_keys + 1)
    empty = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    return empty.scatter(-1, indices, True)[..., :num_keys]


def chosen_blocks(
    indices: torch.Tensor, size: int, num_heads: int, num_keys: int
) -> torch.Tensor:
    """A mask of the blocks of keys that are named by their indices.

    Parameters
    ----------
    indices : Tensor, (batch, groups, seqlen_q, n)
        Of each group of heads; below 0 is none.
    size : int
        Keys of a block.
    num_heads, num_keys : int

    Returns
    -------
    Tensor, (batch, num_heads, seqlen_q, num_keys)
    """
    blocks = chosen_keys(indices.flatten(0, 1), -(-num_keys // size))
    blocks = blocks.view(*indices.shape[:-1], -1)
    keys = blocks.repeat_interleave(size, -1)[..., :num_keys]
    return keys.repeat_interleave(num_heads // indices.shape[1], 1)
