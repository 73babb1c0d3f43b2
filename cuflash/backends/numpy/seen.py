"""Which queries of a part see which of some keys or pairs.

Flags have the axes of `tiles` but the last: (batch, num_heads_kv,
group_size, tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cuflash.backends.numpy.scores import BLOCK_Q
from cuflash.reference.masks import tiles as cut
from cuflash.reference.options import Options, Tile, Tiles

_MASKS = (
    "causal", "window", "segment_ids_q", "segment_ids_k", "mask", "mask_mod",
    "mod_arrays", "head_indices",
)  # fmt: skip


def visible_tiles(
    options: dict[str, Any], seqlen_q: int, seqlen_k: int, keys: slice
) -> Iterator[tuple[Tile, np.ndarray | None]]:
    """Cut the queries into tiles, with the mask of these keys; None: all.

    In tiles, because masks take memory. Without those that see nothing.
    """
    masked = {x: options[x] for x in _MASKS if x in options}
    pairs = Tiles(seqlen_q, seqlen_k, 1.0, Options(**masked))
    for start, stop in cut(seqlen_q, BLOCK_Q):
        tile = Tile(start, stop, keys.start, keys.stop)
        visible = pairs.visible(tile)
        if visible is None or visible.any():
            yield tile, visible


def readers(
    keys: np.ndarray,
    bad_pairs: Sequence[np.ndarray],
    options: dict[str, Any],
    done: np.ndarray,
) -> np.ndarray:
    """Flag the rows that see one of some keys or pairs, without those done."""
    found = np.zeros_like(done)
    places = np.flatnonzero(keys.any(axis=(0, 1, 2)))
    bad_pairs = [x for x in bad_pairs if x.any()]
    if not places.size and not bad_pairs:
        return found
    span = slice(0, keys.shape[-1])
    if not bad_pairs:
        span = slice(int(places[0]), int(places[-1]) + 1)
    columns = of_heads_alike(keys)[..., None, places]
    lengths = done.shape[-1], keys.shape[-1]
    for tile, visible in visible_tiles(options, *lengths, span):
        rows = found[..., tile.queries]
        if done[..., tile.queries].all():
            continue
        seen = columns
        if visible is not None:
            seen = seen & visible[..., places - span.start]
        rows |= seen.any(axis=-1)
        for bad in bad_pairs:
            seen = tile.of(bad)
            rows |= (seen if visible is None else seen & visible).any(axis=-1)
    return found & ~done


def seeing(
    rows: np.ndarray, seqlen_k: int, options: dict[str, Any]
) -> np.ndarray:
    """Return these rows without those that see no key."""
    found = np.zeros_like(rows)
    if not rows.any():
        return found
    lengths = rows.shape[-1], seqlen_k
    for tile, visible in visible_tiles(options, *lengths, slice(0, seqlen_k)):
        own = rows[..., tile.queries]
        if visible is not None:
            own = own & visible.any(axis=-1)
        found[..., tile.queries] = own
    return found


def of_heads_alike(flags: np.ndarray) -> np.ndarray:
    """Those of one head if all heads have the same, as they often do."""
    of_one = flags[:, :1, :1]
    return of_one if (flags == of_one).all() else flags
