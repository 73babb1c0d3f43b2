"""Block masks: FlexAttention's own, and `create_block_mask` for its programs.

A `BlockMask` of PyTorch's lists blocks of pairs, and a mask_mod for some of
them. Here it becomes one mask: a table of its blocks, and the mask_mod where
the table says so.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from cuflash.api.tile_mask import TileMask, tile_mask
from cuflash.errors import DTypeError, ShapeError, UnsupportedError, in_words

from . import block_slices, functions
from .compiled_functions import Blocks, visible_in
from .dtypes import to_numpy
from .function_keys import key_of
from .listed_blocks import is_captured, key_if_implied

_Mask = Callable[..., Any]


class BlockMask:
    """A mask_mod, and the sizes that it is for.

    Made by `create_block_mask`. Calls that share one find out once which
    tiles it leaves, unless a tensor that it reads has changed.

    Attributes
    ----------
    mask_mod : callable
    shape : tuple of int
        Batch, heads, queries, keys; 1 stands for any batch, any heads.
    BLOCK_SIZE : tuple of int
        Queries and keys of a block, as they are sliced and listed; calls
        choose tiles of their own.
    """

    def __init__(
        self,
        mask_mod: _Mask,
        shape: tuple[int, int, int, int],
        block_size: tuple[int, int],
    ) -> None:
        self.mask_mod, self.shape = mask_mod, shape
        self.BLOCK_SIZE = block_size
        # Made when it is asked for: compilers trace this.
        self._snapshot: functions.Snapshot | None = None

    @property
    def snapshot(self) -> functions.Snapshot:
        """What calls share; `mask_mod` may be assigned."""
        found = self._snapshot
        if found is None or found.mask_mod is not self.mask_mod:
            found = self._snapshot = functions.Snapshot(self.mask_mod)
        return found

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys, which may be assigned."""
        return self.shape[2:]

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        seqlen_q, seqlen_k = lengths
        self.shape = *self.shape[:2], seqlen_q, seqlen_k

    def numel(self) -> int:
        """The number of pairs, visible or not."""
        return math.prod(self.shape)

    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some batch elements, heads, blocks of queries.

        Its `mask_mod` is this one's of what was chosen, counted from 0. All
        axes stay; one batch element or head that is left stands for any.

        Parameters
        ----------
        index : int, slice or Tensor of int, or tuple of up to three
            Of a tensor on a CUDA device no index is checked.

        Raises
        ------
        CuflashError
        """
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) > 3:
            raise ShapeError(
                f"a block mask is sliced by {len(indices)} indices, expected"
                " up to three: batch, heads, blocks of queries"
            )
        indices = *indices, *(slice(None),) * (3 - len(indices))
        batch, heads, seqlen_q, seqlen_k = self.shape
        size = self.BLOCK_SIZE[0]
        starts = range(0, max(seqlen_q, 1), size)
        of_batch, of_heads = (
            block_slices.chosen(x, axis, length)
            for axis, (x, length) in enumerate(
                zip(indices, (batch, heads), strict=False)
            )
        )
        rows = block_slices.chosen(indices[2], 2, len(starts), size)
        mask_mod = block_slices.sliced(
            self.mask_mod, of_batch, of_heads, rows, size
        )
        if rows is not None:
            seqlen_q = block_slices.queries_of(rows, starts, seqlen_q)
        shape = (
            batch if of_batch is None else of_batch.number,
            heads if of_heads is None else of_heads.number,
            *(seqlen_q, seqlen_k),
        )
        return BlockMask(mask_mod, shape, self.BLOCK_SIZE)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Its parts, as torch's BlockMask has them, computed on the host.

        `seq_lengths`; of blocks of which some pairs are visible how many each
        row of blocks has, and their columns first, `kv_num_blocks` and
        `kv_indices`; the same of blocks that are visible as a whole, then both
        of columns of blocks; None for each order of dq that torch's has (four
        in PyTorch 2.13); `BLOCK_SIZE`; `mask_mod`.

        Parameters
        ----------
        flatten : bool
            Whether lengths and sizes are numbers of the tuple, not tuples.
        """
        flags = torch.from_numpy(self.tiles().flags.copy())
        flags = flags.expand(*self.shape[:2], *flags.shape[2:])
        flags = _as_listed(flags, self.seq_lengths, self.BLOCK_SIZE)
        lists = [
            x
            for of_rows in (flags, flags.transpose(-2, -1))
            for kind in (1, 2)
            for x in _listed(of_rows == kind)
        ]
        lengths: tuple[Any, ...] = self.seq_lengths
        sizes: tuple[Any, ...] = self.BLOCK_SIZE
        if not flatten:
            lengths, sizes = (lengths,), (sizes,)
        orders = (None,) * _number_of_orders()
        return *lengths, *lists, *orders, *sizes, self.mask_mod

    def __call__(self, *indices: Any) -> Any:
        """Call `mask_mod`."""
        return self.mask_mod(*indices)

    def tiles(self) -> TileMask:
        """Which blocks have a visible pair, computed on the host."""
        found = functions.taken({"mask_mod": self.mask_mod}, {}, None)
        assert found is not None
        on_host = {n: to_numpy(x.cpu()) for n, x in found.arrays.items()}
        batch, heads, seqlen_q, seqlen_k = self.shape
        return tile_mask(
            **found.as_options(on_host),
            batch=batch,
            num_heads=heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            block_q=self.BLOCK_SIZE[0],
            block_k=self.BLOCK_SIZE[1],
        )

    def sparsity(self) -> float:
        """The share of blocks without a visible pair, in percent."""
        return 100 * (1 - self.tiles().visited)

    def to_dense(self) -> torch.Tensor:
        """1 where a block has visible pairs: (batch, heads, rows, columns)."""
        flags = torch.from_numpy((self.tiles().flags != 0).astype("int32"))
        return flags.expand(*self.shape[:2], *flags.shape[2:])

    def to(self, device: Any) -> BlockMask:
        """Itself: what its mask_mod reads is where that was made."""
        return self

    def __repr__(self) -> str:
        name = getattr(self.mask_mod, "__name__", repr(self.mask_mod))
        return f"<BlockMask of {name}, shape {self.shape}>"


def _as_listed(
    flags: torch.Tensor, lengths: tuple[int, int], sizes: tuple[int, int]
) -> torch.Tensor:
    """The flags where torch counts pairs past the ends as masked ones."""
    flags = flags.clone()
    for axis, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        if length % size:
            flags.narrow(2 + axis, -1, 1).clamp_(max=1)
    return flags


@functools.cache
def _number_of_orders() -> int:
    """How many entries of torch's tuple say in what order dq is added."""
    from torch.nn.attention.flex_attention import BlockMask as Theirs

    names = inspect.signature(Theirs.__init__).parameters
    return sum(x.startswith("dq_") for x in names)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks a row has, and its columns: those of these first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int(), order.int()


# Arguments of torch's function that say how its blocks are listed.
_OF_THEIR_LISTS = frozenset(
    ("separate_full_blocks", "compute_dq_write_order", "dq_kv_order")
)


def create_block_mask(
    mask_mod: _Mask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    **others: Any,
) -> BlockMask:
    """A mask for `flex_attention`, as torch's function of this name makes it.

    It computes nothing: calls find out themselves which tiles a mask leaves.

    Parameters
    ----------
    mask_mod : callable
        ``mask_mod(b, h, q_idx, kv_idx)``: True where the pair is visible.
        Tensors that it closes over are read when calls run.
    B, H : int or None
        Batch and query heads; None, or 1, if the mask is the same for all.
    Q_LEN, KV_LEN : int
        Queries and keys.
    device : optional
        Ignored: calls run where their tensors are.
    BLOCK_SIZE : int or tuple of int, optional
        For `BlockMask.sparsity` and `BlockMask.to_dense` alone.

    Returns
    -------
    BlockMask

    Raises
    ------
    UnsupportedError
        For a keyword that torch's function does not have.

    See Also
    --------
    cuflash.tile_mask : which tiles a mask leaves.

    Examples
    --------
    >>> import cuflash.torch
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> mask = cuflash.torch.create_block_mask(causal, None, None, 300, 300)
    >>> mask.to_dense()[0, 0]
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    for name in others.keys() - _OF_THEIR_LISTS:
        raise UnsupportedError(
            f"{name} is no argument of create_block_mask, here or in PyTorch:"
            " leave it out"
        )
    size = BLOCK_SIZE
    blocks = (size, size) if isinstance(size, int) else (size[0], size[1])
    return BlockMask(mask_mod, (B or 1, H or 1, Q_LEN, KV_LEN), blocks)


# ---- What a call makes of a block mask ----


class _Theirs:
    """The mask of a BlockMask of PyTorch's, and what it was made of.

    look : whether to find out if the mask_mod implies the lists.
    """

    def __init__(self, block_mask: Any, look: bool) -> None:
        self._parts = _parts_of(vars(block_mask))
        self._tensors = [x for x in self._parts if isinstance(x, torch.Tensor)]
        self._versions = _versions_of(self._tensors)
        self.shape = tuple(block_mask.shape)
        blocks, self._mask_mod = _blocks(block_mask), block_mask.mask_mod
        self._key: object = None
        if look and self._versions is not None:  # else it is made each call
            self._key = key_if_implied(blocks, block_mask.seq_lengths)
        is_implied = self._key is not None
        visible = self._mask_mod if is_implied else _with_table(blocks)
        self.snapshot = functions.Snapshot(visible)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A copy of a block mask has none."""
        return type(None), ()

    def is_of(self, block_mask: Any) -> bool:
        """Whether the block mask still is what it was."""
        if not self.lists(block_mask):
            return False
        return self._key is None or key_of(self._mask_mod).value == self._key

    def lists(self, block_mask: Any) -> bool:
        """Whether its parts are the same; what mask_mod reads may differ."""
        parts = _parts_of(vars(block_mask))
        if not all(map(operator.is_, parts, self._parts)):
            return False
        versions = self._versions
        return versions is not None and _versions_of(self._tensors) == versions


def _versions_of(tensors: list[torch.Tensor]) -> list[Any] | None:
    """What changes with their content; None: that is not known of one."""
    found = [functions.version_of(x) for x in tensors]
    return None if None in found else found


# The attribute of a BlockMask of PyTorch's that holds its `_Theirs`, which may
# lead to it: a table, even a weak one, would keep both.
_KNOWN = "_cuflash_mask"
_parts_of = operator.itemgetter(
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "mask_mod", "seq_lengths", "BLOCK_SIZE",
)  # fmt: skip


def mask_of(
    block_mask: Any, sizes: tuple[int, int, int, int]
) -> BlockMask | _Theirs | Blocks | _Mask | None:
    """The `mask_mod` of a call with a block mask; None without an effect.

    Parameters
    ----------
    block_mask : BlockMask, or torch's
    sizes : tuple of int
        Batch, query heads, queries and keys of the call.

    Raises
    ------
    DTypeError
        If it is no block mask.
    ShapeError
        If it is for other sizes.
    """
    compiling = torch.compiler.is_compiling()
    if isinstance(block_mask, BlockMask):
        _check_sizes(block_mask.shape, sizes)
        return block_mask.mask_mod if compiling else block_mask
    own = {} if compiling else getattr(block_mask, "__dict__", {})
    found = own.get(_KNOWN)
    if found is not None and found.is_of(block_mask):
        _check_sizes(found.shape, sizes)
        return found
    if not hasattr(block_mask, "kv_num_blocks"):
        raise DTypeError(
            f"block_mask is {in_words(block_mask)}, expected what"
            " create_block_mask returns: write block_mask=create_block_mask("
            "mask_mod, None, None, Q_LEN, KV_LEN)"
        )
    if min(block_mask.BLOCK_SIZE) >= 2**30:  # torch's default: hides nothing
        return None
    _check_sizes(tuple(block_mask.shape), sizes)
    if compiling:
        return _blocks(block_mask)
    # A function that has changed may do so in each call: no second look.
    look = found is None or not found.lists(block_mask)
    found = _Theirs(block_mask, look)
    if not is_captured(block_mask.kv_num_blocks):
        own[_KNOWN] = found  # else its table is written by replays alone
    return found


def _check_sizes(
    shape: tuple[int, ...], sizes: tuple[int, int, int, int]
) -> None:
    if shape == sizes:
        return
    batch, heads, seqlen_q, seqlen_k = sizes
    if (
        len(shape) != 4 or shape[2:] != (seqlen_q, seqlen_k)
        or shape[0] not in (1, batch) or shape[1] not in (1, heads)
    ):  # fmt: skip
        raise ShapeError(
            f"block_mask is for {tuple(shape)}, expected {sizes}: batch,"
            " heads, queries and keys, of which the first two may be 1;"
            " make it for these: create_block_mask(mask_mod, None, None,"
            f" {seqlen_q}, {seqlen_k})"
        )


def _blocks(block_mask: Any) -> Blocks:
    """A BlockMask in parts."""
    rows, columns = block_mask.BLOCK_SIZE
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    size = rows, columns, batch > 1, heads > 1
    return Blocks(block_mask.mask_mod, _table(block_mask), size)


def _with_table(blocks: Blocks) -> _Mask:
    """The mask of a BlockMask: its mask_mod where a block is listed so."""
    mask_mod, table, size = blocks

    def visible(*indices: Any) -> Any:
        return visible_in(table, mask_mod, size, indices)

    return visible


def _table(block_mask: Any) -> torch.Tensor:
    """How each block is listed: `Blocks.table`."""
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    counts = block_mask.kv_num_blocks
    # One more column, for places in the lists that hold nothing.
    table = counts.new_zeros((*counts.shape, columns + 1), dtype=torch.uint8)
    for kind, name in ((1, "kv"), (2, "full_kv")):
        counts = getattr(block_mask, f"{name}_num_blocks")
        indices = getattr(block_mask, f"{name}_indices")
        if counts is None:
            continue
        place = torch.arange(indices.shape[-1], device=indices.device)
        listed = torch.where(place < counts[..., None], indices, columns)
        table.scatter_(-1, listed.long(), kind)
    return table[..., :columns].contiguous()
