"""A checked request: `Problem`, its values, and `Call`, with the arrays.

Calls that differ only in their data share one `Signature`, which is the key
of every cache of decisions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from cuflash.expressions.nodes import Node
from cuflash.expressions.trace import ArrayKind
from cuflash.request.kept import Kept
from cuflash.request.readout import Readout

DType = Literal["float16", "bfloat16", "float32", "float64"]


@dataclass(frozen=True)
class Rotary:
    """A rotary position embedding, without its arrays.

    Attributes
    ----------
    rotary_dim : int
        The columns that are rotated, from the first.
    num_positions : int
        The rows of cos and sin.
    tables : str
        The dtype of cos and sin.
    positions : str or None
        The dtype of positions; None: tokens are at 0, 1, 2, ...
    interleaved : bool
        Pairs of columns are (2i, 2i + 1), else (i, i + rotary_dim / 2).
    inverse : bool
    """

    rotary_dim: int
    num_positions: int
    tables: DType
    positions: Literal["int32", "int64"] | None
    interleaved: bool
    inverse: bool


@dataclass(frozen=True)
class KVCache:
    """The caches of a `forward_kvcache` call, without their arrays.

    Attributes
    ----------
    dtype : str
        The caches' dtype: the call's, or "float8_e4m3fn".
    page_size : int or None
        The tokens of a page; None: a sequence's tokens are the rows of a
        slot.
    slots : int
        The length of the caches' first axis: slots or pages.
    max_pages : int
        The columns of page_table; 0 without it.
    seqlen_new : int
        The tokens that are appended to each sequence; 0 without k_new. The
        largest number of them if they are packed.
    lengths : bool
        Whether cache_seqlens is an array; else it is an int, which is not
        part of a problem.
    batch_idx, leftpad : bool
        Whether cache_batch_idx and cache_leftpad are given.
    packed_queries, packed_new : bool
        Whether q, and k_new and v_new, are packed by cu_seqlens_q.
    total_q : int
        The tokens of q, of all sequences.
    scales : str or None
        What each number of k_scale and v_scale is for: a key head, or a key
        head of a page.
    alignment : int
        Of all rows of the caches, in bytes: a power of two, up to
        `ALIGNMENT`.
    rotary : Rotary or None
    latent : bool
        Whether v_cache is the memory of k_cache's first columns: a token's
        value is the beginning of its key.
    """

    dtype: str
    page_size: int | None
    slots: int
    max_pages: int = 0
    seqlen_new: int = 0
    lengths: bool = False
    batch_idx: bool = False
    leftpad: bool = False
    packed_queries: bool = False
    packed_new: bool = False
    total_q: int = 0
    scales: Literal["head", "page"] | None = None
    alignment: int = 16
    rotary: Rotary | None = None
    latent: bool = False


@dataclass(frozen=True)
class Tangents:
    """The tangents of a `jvp` call, without their arrays.

    Or the cotangents of `double_backward`, whose first pass is a JVP in their
    direction.

    Attributes
    ----------
    of : tuple of str
        The inputs that have one, of q, k, v, bias and sink, in this order.
        The others do not move.
    count : int
        Directions: each of these inputs has as many tangents. 1 in a double
        backward.
    """

    of: tuple[str, ...]
    count: int = 1


def option(absent: Any, name: str = "") -> Any:
    """A field of an option: its value without it, its name if another."""
    return field(default=absent, metadata={"option": name})


@dataclass(frozen=True)
class Problem:
    """One attention problem, without its arrays.

    Equal problems get equal plans. A scalar option (docs/guide/options.md)
    is stored by value, 0 or None if absent; an array option, and `dlse`, as
    whether it is present; a user's function as the graph that it recorded
    (expressions/trace.py), the arrays that it reads as their kinds, of which
    `return_dmod` holds indices, its numbers as how many there are. `window` is
    normalised: a right bound of 0 becomes `causal`, and bounds that mask
    nothing become None. If `num_sequences` is not None (it may be 0),
    sequences are packed: ``batch`` is 1, and ``seqlen_q`` and ``seqlen_k`` are
    the totals over all sequences.

    A ``"merge"`` problem (`merge_states`) of ``num_states`` results has no
    keys: ``seqlen_k`` is 0, ``scale`` 1, ``num_heads_kv`` equals
    ``num_heads_q`` and ``head_dim`` equals ``head_dim_v``. So has a
    ``"rotary"`` problem (`apply_rotary`), whose x counts as queries. In a
    ``"kvcache"`` problem (`forward_kvcache`) ``batch`` is the number of
    sequences, ``seqlen_q`` the most queries and ``seqlen_k`` the most tokens
    of one: the capacity. A ``"jvp"`` problem is a forward problem with
    tangents; a ``"double_backward"`` problem is a backward problem with
    cotangents, in which ``return_dbias`` asks for d2bias and ``return_dsink``
    for d2sink. A problem of `READOUTS` or `READOUT_GRADIENTS` has no values:
    ``head_dim_v`` equals ``head_dim``. It has no dropout either, which acts on
    values alone.
    ``return_max_score`` is of a forward problem.
    """

    direction: Literal[
        "forward", "backward", "merge", "rotary", "kvcache", "jvp",
        "double_backward", "weights", "weight_sums", "entropy",
        "weights_backward", "weight_sums_backward", "entropy_backward",
    ]  # fmt: skip
    dtype: DType
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    causal: bool = False
    block_q: int | None = None
    block_k: int | None = None
    deterministic: bool = False
    precision: Literal["tf32x3"] | None = None
    num_splits: int | None = None
    window: tuple[int | None, int | None] = option((None, None))
    softcap: float = option(0.0)
    alibi_slopes: bool = option(False)
    bias: str | None = option(None)
    mask: bool = option(False)
    sink: bool = option(False)
    segment_ids: bool = option(False)
    dropout: float = option(0.0)
    num_sequences: int | None = option(None, "cu_seqlens")
    score_mod: Node | None = option(None)
    mask_mod: Node | None = option(None)
    mod_arrays: tuple[ArrayKind, ...] = ()
    mod_numbers: int = 0
    return_dmod: tuple[int, ...] = ()
    bias_is_broadcast: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    return_dbias: bool = False
    return_dsink: bool = False
    dlse: bool = False
    rotary: Rotary | None = None
    kvcache: KVCache | None = None
    tangents: Tangents | None = None
    return_ddlse: bool = False
    return_max_score: bool = False
    num_states: int = 0
    readout: Readout | None = None

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """The names of the options that are present."""
        return tuple(
            x.metadata["option"] or x.name
            for x in _OPTIONS
            if getattr(self, x.name) != x.default
        )

    @property
    def group_size(self) -> int:
        """Query heads that share a key head: head h reads h // group_size."""
        return self.num_heads_q // max(self.num_heads_kv, 1)

    @property
    def lse_dtype(self) -> Literal["float32", "float64"]:
        """The dtype of lse."""
        return "float64" if self.dtype == "float64" else "float32"


_OPTIONS = tuple(x for x in fields(Problem) if "option" in x.metadata)


@dataclass(frozen=True)
class Layout:
    """An array without its data, in full rank.

    Attributes
    ----------
    shape, strides : tuple of int
        Strides in bytes; arbitrary for an axis of length 1.
    dtype : dtype
    offset : int
        The address modulo `ALIGNMENT`, in bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    offset: int = 0


MAX_SPLITS = 128  # about as many as a large GPU has SMs
ALIGNMENT = 16  # the widest load of a kernel, in bytes

# The states that the structs of merge.cu have room for: one for a few, one of
# almost the 4096 bytes that a kernel's arguments may have.
FEW_STATES, MOST_STATES = 8, 240


@dataclass(frozen=True, eq=False)
class Signature:
    """A checked call without its data; equal calls share one object.

    Attributes
    ----------
    problem : Problem
    rank : int
        2, 3 or 4: the rank of the arrays that the user passed; of q.
    layouts : mapping of str to Layout
        By argument name, the user's ``out=``, ``dq=``, ``dk=`` and ``dv=``
        among them.
    return_lse : bool
        Forward, jvp: whether lse is wanted.
    options : mapping of str to Layout
        The array options, broadcast to their full shapes; those that a user's
        function reads, as ``mod_arrays[0]`` and so on; cos, sin and
        positions of `apply_rotary`; of `forward_kvcache` every array but
        q, out, the caches, k_new and v_new; `READOUT_ARRAYS`.
    bias_shape : tuple of int
        The shape of the bias as the user passed it, which dbias has too.
    tangents : mapping of str to Layout
        The tangents by what they move, q, k, v, bias or sink, in full rank
        after an axis of directions.
    several : bool
        Whether the tangents that the user passed have an axis of directions.
    """

    problem: Problem
    rank: int
    layouts: Mapping[str, Layout]
    return_lse: bool = False
    options: Mapping[str, Layout] = field(default_factory=dict)
    bias_shape: tuple[int, ...] = ()
    tangents: Mapping[str, Layout] = field(default_factory=dict)
    several: bool = False


@dataclass(eq=False)  # not frozen: a frozen one takes twice as long to make
class Call:
    """A signature and its arrays, all on one device.

    Attributes
    ----------
    signature : Signature
    given : mapping of str to array
        The inputs by argument name, as the user passed them.
    given_out : array or None
        Forward, rotary: the user's ``out=``, which receives the result.
    given_gradients : mapping of str to array
        Backward: the user's ``dq=``, ``dk=`` and ``dv=``, which receive the
        gradients; only those that were passed.
    options : mapping of str to array
        The array options, as the user passed them.
    seed : int
        The seed of dropout.
    cache_seqlens : int
        `forward_kvcache`: the length of every sequence before the call,
        unless `options` has an array of lengths.
    tangents : mapping of str to array
        `jvp`, `double_backward`: the tangents or cotangents by what they
        move, q, k, v, bias or sink, as the user passed them.
    mod_numbers : tuple
        The numbers that a user's functions read, by slot.
    kept : Kept or None
        What it shares with other calls that have the same `TileMask`.
    """

    signature: Signature
    given: Mapping[str, Any]
    given_out: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    cache_seqlens: int = 0
    given_gradients: Mapping[str, Any] = field(default_factory=dict)
    tangents: Mapping[str, Any] = field(default_factory=dict)
    mod_numbers: tuple[Any, ...] = ()
    kept: Kept | None = None

    @property
    def problem(self) -> Problem:
        """The problem of the signature."""
        return self.signature.problem

    @property
    def rank(self) -> int:
        """The rank of the arrays that the user passed."""
        return self.signature.rank

    @property
    def return_lse(self) -> bool:
        """Forward: whether lse is wanted."""
        return self.signature.return_lse

    @functools.cached_property
    def arrays(self) -> Mapping[str, Any]:
        """The inputs as views in full rank.

        q, k, v, out and dout are (batch, seqlen, heads, head_dim), lse, dlse
        and dentropy (batch, num_heads_q, seqlen_q), dsums (batch,
        num_heads_q, seqlen_k), dweights (batch, heads, queries, keys). Any
        strides.
        """
        return {name: self._full(name, x) for name, x in self.given.items()}

    @functools.cached_property
    def directions(self) -> Mapping[str, Any]:
        """The tangents as views after an axis of directions.

        Those of q, k and v are in full rank, those of bias and sink have the
        axes that the user passed.
        """
        whole = slice(None)
        views = {}
        for name, array in self.tangents.items():
            view = array if self.signature.several else array[None]
            if name in "qkv" and self.rank != 4:
                view = view[(whole, *_MISSING[self.rank])]
            views[name] = view
        return views

    @property
    def out(self) -> Any:
        """The user's ``out=`` in full rank, None without one."""
        if self.given_out is None:
            return None
        return self._full("out", self.given_out)

    @property
    def gradients(self) -> Mapping[str, Any]:
        """The user's ``dq=``, ``dk=``, ``dv=`` in full rank, if any."""
        given = self.given_gradients
        return {name: self._full(name, x) for name, x in given.items()}

    def _full(self, name: str, array: Any) -> Any:
        rank = self.signature.rank
        if rank == 4 or array.ndim == 4:  # caches, where q is packed
            return array
        if name == "dweights":
            return array[(None,) * (4 - array.ndim)]
        missing = _MISSING_LSE if like_lse(name) else _MISSING
        return array[missing[rank]]


def like_lse(name: str) -> bool:
    """Whether an array has the dtype of lse, and its axes."""
    return name.startswith(("lse", "dlse", "dsums", "dentropy"))


# Indices that insert the axes that the user left out.
_MISSING: dict[int, tuple] = {
    3: (None,),
    2: (None, slice(None), None, slice(None)),
}
_MISSING_LSE = {3: (None,), 2: (None, None)}


def strip(array: Any, rank: int) -> Any:
    """Drop the axes of (batch, seqlen, heads, d) that q, of a rank, lacks."""
    if rank == 4:
        return array
    return array[0] if rank == 3 else array[0, :, 0]


def strip_lse(lse: Any, rank: int) -> Any:
    """Drop the axes of (batch, heads, seqlen) that q, of a rank, lacks."""
    if rank == 4 or lse is None:
        return lse
    return lse[0] if rank == 3 else lse[0, 0]
