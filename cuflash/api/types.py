"""Types of arrays and options, for type checkers alone.

Those of options are the option table's (request/options.py), spelled out for
checkers that do not run it. tests/unit/test_types.py compares them with the
calls' signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
)

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import jax
    import torch


class SupportsDLPack(Protocol):
    """An array that others read by DLPack: CuPy's, torch's, JAX's."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsCudaArrayInterface(Protocol):
    """An array on a CUDA device that says where it is."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


NumPyArray: TypeAlias = npt.NDArray[Any]
Array: TypeAlias = NumPyArray | SupportsDLPack | SupportsCudaArrayInterface
Indices: TypeAlias = Array | Sequence[Any] | slice
Window: TypeAlias = tuple[int | None, int | None]
Integers: TypeAlias = int | np.integer[Any]


if TYPE_CHECKING:  # Python 3.10 has no TypedDict with type variables
    # An option's array, its seed, a number of tokens.
    A = TypeVar("A")
    S = TypeVar("S")
    N = TypeVar("N")

    class CacheOptionsOf(TypedDict, Generic[A], total=False):
        """The rows of the option table that `forward_kvcache` has."""

        window: Window | None
        softcap: float | None
        alibi_slopes: A | None
        sink: A | None

    class OptionsOf(CacheOptionsOf[A], Generic[A, S], total=False):
        """The rows of the option table that `forward` has."""

        bias: A | None
        mask: A | None
        segment_ids_q: A | None
        segment_ids_k: A | None
        dropout: float
        seed: S | None
        cu_seqlens_q: A | None
        cu_seqlens_k: A | None
        max_seqlen_q: int | None
        max_seqlen_k: int | None

    class Traced(TypedDict, total=False):
        """The rows of the option table that bridges do not have."""

        score_mod: Callable[..., Any] | None
        mask_mod: Callable[..., Any] | None
        mod_arrays: Mapping[str, Any] | None

    class Options(OptionsOf[Array, int], total=False):
        """The rows of the option table, with the arrays of `forward`."""

    class TracedOptions(Options, Traced, total=False):
        """All of them."""

    class Scaled(TypedDict, total=False):
        """What a call that computes scores has."""

        scale: float | None
        causal: bool

    class Tiled(Scaled, total=False):
        """What a call with options has."""

        block_q: int | None
        block_k: int | None
        precision: str | None

    class VjpOptions(Options, Tiled, Traced, total=False):
        """The keywords of `vjp`, but for return_lse."""

        num_splits: int | None

    class ForwardOptions(VjpOptions, total=False):
        """The keywords of `forward`, but for those that return more."""

        out: Array | None

    class BackwardOptions(Options, Tiled, Traced, total=False):
        """The keywords of `backward`, but for those that return more."""

        deterministic: bool
        dlse: Array | None
        dq: Array | None
        dk: Array | None
        dv: Array | None

    class ReadoutOptions(Options, Tiled, Traced, total=False):
        """The keywords of `entropy`."""

    class _Chosen(TypedDict, total=False):
        queries: Indices | None
        keys: Indices | None
        heads: Indices | None

    class _Weighted(TypedDict, total=False):
        queries: Indices | None
        row_weights: Array | None
        reduce: str

    class WeightsOptions(ReadoutOptions, _Chosen, total=False):
        """The keywords of `weights`."""

        dtype: npt.DTypeLike | None

    class WeightSumsOptions(ReadoutOptions, _Weighted, total=False):
        """The keywords of `weight_sums`."""

    class EntropyGradientOptions(ReadoutOptions, total=False):
        """The keywords of `entropy_backward`, but for return_dmod."""

        deterministic: bool

    class WeightsGradientOptions(EntropyGradientOptions, _Chosen, total=False):
        """Those of `weights_backward`, but for return_dmod."""

    class WeightSumsGradientOptions(
        EntropyGradientOptions, _Weighted, total=False
    ):
        """Those of `weight_sums_backward`, but for what returns more."""

    class _Attention(Tiled, total=False):
        num_splits: int | None
        deterministic: bool

    class TorchOptions(
        OptionsOf[torch.Tensor, int], _Attention, Traced, total=False
    ):
        """The keywords of `cuflash.torch.attention`, but for return_lse."""

    class JaxOptions(
        OptionsOf[jax.typing.ArrayLike, int | jax.Array],
        _Attention,
        Traced,
        total=False,
    ):
        """The keywords of `cuflash.jax.attention`, but for return_lse."""

    class KVCacheOptionsOf(
        CacheOptionsOf[A], Scaled, Generic[A, N], total=False
    ):
        """The keywords of calls over caches, but for return_lse."""

        head_dim_v: int | None
        k_new: A | None
        v_new: A | None
        cache_seqlens: N | A | None
        page_table: A | None
        cache_batch_idx: A | None
        cache_leftpad: A | None
        cu_seqlens_q: A | None
        max_seqlen_q: int | None
        rotary_cos: A | None
        rotary_sin: A | None
        rotary_interleaved: bool
        k_scale: A | None
        v_scale: A | None
        num_splits: int | None

    class KVCacheOptions(
        KVCacheOptionsOf[Array, Integers], Traced, total=False
    ):
        """Those of `forward_kvcache`."""

        out: Array | None

    class TorchCacheOptions(
        KVCacheOptionsOf[torch.Tensor, int], Traced, total=False
    ):
        """Those of `cuflash.torch.forward_kvcache`."""

        out: torch.Tensor | None

    class JaxCacheOptions(
        KVCacheOptionsOf[jax.typing.ArrayLike, int | jax.typing.ArrayLike],
        Traced,
        total=False,
    ):
        """Those of `cuflash.jax.forward_kvcache`."""


class RotaryOptions(TypedDict, total=False):
    """Those of `apply_rotary`."""

    positions: Array | None
    interleaved: bool
    inverse: bool
    out: Array | None
