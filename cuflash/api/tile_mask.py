"""The public function `tile_mask`: which tiles a user's mask leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import settings
from cuflash.api.arrays import on_cuda
from cuflash.errors import ValueRangeError
from cuflash.request import checks, options, traced
from cuflash.request.kept import Kept
from cuflash.request.problem import Call
from cuflash.request.validate import devices

if TYPE_CHECKING:
    from cuflash.api.types import Integers, NumPyArray

__all__ = ["TileMask", "function_of", "share", "tile_mask"]


@dataclass(frozen=True, eq=False, repr=False)
class TileMask:
    """A `mask_mod` with its arrays, and which tiles it leaves.

    Pass it as `mask_mod` to `forward` and `backward`: they take the function
    and its arrays from it, for sequences of any lengths. Made by `tile_mask`.

    Calls that share one find out only once which of their kernels' tiles it
    leaves, for each direction and shape: the later ones save this time. So it
    is a snapshot. After an array that the mask reads has changed in place,
    make another.

    Attributes
    ----------
    mask_mod : callable
    mod_arrays : dict
    flags : ndarray of uint8, (batch or 1, heads or 1, q_tiles, k_tiles)
        0 if no pair of a tile is visible, 1 if some are, 2 if all are. The
        first two axes have length 1 where all batches, or heads, are alike.
    block_q, block_k : int
        Queries and keys of a tile; the last tile of an axis may have fewer.
    """

    mask_mod: Callable[..., Any]
    mod_arrays: dict[str, Any]
    flags: NumPyArray
    block_q: int
    block_k: int
    _kept: Kept = field(default_factory=Kept, init=False)

    @property
    def visited(self) -> float:
        """The share of tiles with a visible pair."""
        return float(np.mean(self.flags != 0)) if self.flags.size else 0.0

    def __call__(self, *indices: Any, **arrays: Any) -> Any:
        """Call `mask_mod`."""
        return self.mask_mod(*indices, **arrays)

    def __repr__(self) -> str:
        name = getattr(self.mask_mod, "__name__", repr(self.mask_mod))
        return (
            f"<TileMask of {name}: {self.visited:.1%} of tiles of"
            f" {self.block_q} x {self.block_k} pairs are visited>"
        )


def tile_mask(
    mask_mod: Callable[..., Any],
    *,
    batch: Integers = 1,
    num_heads: Integers = 1,
    seqlen_q: Integers,
    seqlen_k: Integers,
    mod_arrays: Mapping[str, Any] | None = None,
    block_q: Integers = 128,
    block_k: Integers = 128,
) -> TileMask:
    """Which tiles of queries and keys a `mask_mod` leaves.

    Computed on the host. Calls with `mask_mod` do the same on their device
    for the tiles of their kernels. They need no `TileMask`, but those that
    share one do it once.

    Parameters
    ----------
    mask_mod : callable
        As for `forward`; or a `TileMask`, of which function and arrays count.
    batch, num_heads : int, optional
        Sequences, and query heads.
    seqlen_q, seqlen_k : int
        Queries and keys of a sequence.
    mod_arrays : dict, optional
        The arrays and numbers that `mask_mod` reads; NumPy arrays, or arrays
        on a CUDA device, which are copied to the host.
    block_q, block_k : int, optional
        Queries and keys of a tile.

    Returns
    -------
    TileMask

    Raises
    ------
    CuflashError
        In the same cases as `forward`.

    See Also
    --------
    forward : takes the result as `mask_mod`.

    Notes
    -----
    From the ranges of indices in a tile follow the values that `mask_mod` may
    have, which decides most tiles; in the others each pair is tested. Reals
    are float32. Tiles of one query and one key give the mask itself:
    ``tile_mask(..., block_q=1, block_k=1).flags == 2``.

    Examples
    --------
    >>> import cuflash
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> tiles = cuflash.tile_mask(causal, seqlen_q=300, seqlen_k=300)
    >>> tiles.flags[0, 0]
    array([[1, 0, 0],
           [2, 1, 0],
           [2, 2, 1]], dtype=uint8)
    >>> tiles
    <TileMask of causal: 66.7% of tiles of 128 x 128 pairs are visited>
    """
    from cuflash.backends.numpy.tile_flags import Tiles, tile_flags

    settings.check()
    tiles = Tiles(
        checks.whole("batch", batch, 1, 2**31 - 1),
        checks.whole("num_heads", num_heads, 1, 2**31 - 1),
        checks.length("seqlen_q", seqlen_q),
        checks.length("seqlen_k", seqlen_k),
        checks.whole("block_q", block_q, 1, 2**31 - 1),
        checks.whole("block_k", block_k, 1, 2**31 - 1),
    )
    asked = function_of({"mask_mod": mask_mod, "mod_arrays": mod_arrays})
    others, arrays = options.split(asked)
    on_host = _on_host(arrays)
    found = traced.recorded(others | on_host)
    flags = tile_flags(
        dict(found.fields)["mask_mod"],
        [on_host[x] for x in found.names],
        found.numbers,
        tiles,
    )
    flags.setflags(write=False)
    return TileMask(
        asked["mask_mod"],
        dict(asked["mod_arrays"] or {}),
        flags,
        tiles.block_q,
        tiles.block_k,
    )


def _on_host(arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays of `mod_arrays` as NumPy arrays, copied from a device."""
    if not arrays:
        return {}
    if devices.device_of("forward", **arrays) == "cpu":
        return {name: np.asarray(x) for name, x in arrays.items()}
    cupy = on_cuda()
    return {name: cupy.to_cupy(x).get() for name, x in arrays.items()}


def share(call: Call, mask_mod: Any, options: Mapping[str, Any]) -> None:
    """Let a call share the flags of its kernels' tiles with others.

    Parameters
    ----------
    call : Call
    mask_mod : callable
        As the user passed it; calls with one `TileMask` share.
    options : dict
        The call's options and arrays.
    """
    mask = call.problem.mask_mod
    if mask is None or not isinstance(mask_mod, TileMask):
        return
    if traced.reads_only(mask, options, mask_mod.mod_arrays):
        call.kept = mask_mod._kept


def function_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with the function and the arrays of a `TileMask` in its place.

    Raises
    ------
    ValueRangeError
        If `mod_arrays` has other arrays by the same names.
    """
    tiles = given.get("mask_mod")
    if not isinstance(tiles, TileMask):
        return given
    arrays = given.get("mod_arrays")
    if arrays is None:
        arrays = {}
    if isinstance(arrays, Mapping):
        for name, array in tiles.mod_arrays.items():
            if arrays.get(name, array) is not array:
                raise ValueRangeError(
                    f"mod_arrays has {name!r}, and so has mask_mod, a"
                    " TileMask with arrays of its own: expected the same"
                    " array, or another name"
                )
        arrays = {**tiles.mod_arrays, **arrays}
    return {**given, "mask_mod": tiles.mask_mod, "mod_arrays": arrays}
