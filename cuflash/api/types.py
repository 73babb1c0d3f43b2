"""Types of arrays and options, for type checkers alone.

The calls' overloads take options as a TypedDict; tests/unit/test_types.py
compares them with the calls' signatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

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
Window: TypeAlias = tuple[int | None, int | None]
Integers: TypeAlias = int | np.integer[Any]


class Options(TypedDict, total=False):
    """The options of `forward`, `backward` and their derivatives."""

    scale: float | None
    causal: bool
    precision: str | None
    window: Window | None
    softcap: float | None
    alibi_slopes: Array | None
    bias: Array | None
    mask: Array | None
    sink: Array | None
    segment_ids_q: Array | None
    segment_ids_k: Array | None
    dropout: float
    seed: int | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class VjpOptions(Options, total=False):
    """Those of `vjp`, but for return_lse."""

    block_q: int | None
    block_k: int | None
    num_splits: int | None


class ForwardOptions(VjpOptions, total=False):
    """Those of `forward`, but for return_lse."""

    out: Array | None


class BackwardOptions(Options, total=False):
    """Those of `backward`, but for return_dbias and return_dsink."""

    block_q: int | None
    block_k: int | None
    deterministic: bool
    dlse: Array | None
    dq: Array | None
    dk: Array | None
    dv: Array | None


class TorchOptions(TypedDict, total=False):
    """Those of `cuflash.torch.attention`, but for return_lse."""

    scale: float | None
    causal: bool
    block_q: int | None
    block_k: int | None
    precision: str | None
    num_splits: int | None
    deterministic: bool
    window: Window | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    sink: torch.Tensor | None
    segment_ids_q: torch.Tensor | None
    segment_ids_k: torch.Tensor | None
    dropout: float
    seed: int | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class JaxOptions(TypedDict, total=False):
    """Those of `cuflash.jax.attention`, but for return_lse."""

    scale: float | None
    causal: bool
    block_q: int | None
    block_k: int | None
    precision: str | None
    num_splits: int | None
    deterministic: bool
    window: Window | None
    softcap: float | None
    alibi_slopes: jax.typing.ArrayLike | None
    bias: jax.typing.ArrayLike | None
    mask: jax.typing.ArrayLike | None
    sink: jax.typing.ArrayLike | None
    segment_ids_q: jax.typing.ArrayLike | None
    segment_ids_k: jax.typing.ArrayLike | None
    dropout: float
    seed: int | jax.Array | None
    cu_seqlens_q: jax.typing.ArrayLike | None
    cu_seqlens_k: jax.typing.ArrayLike | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class KVCacheOptions(TypedDict, total=False):
    """Those of `forward_kvcache`, but for return_lse."""

    k_new: Array | None
    v_new: Array | None
    cache_seqlens: Integers | Array | None
    page_table: Array | None
    cache_batch_idx: Array | None
    cache_leftpad: Array | None
    cu_seqlens_q: Array | None
    max_seqlen_q: int | None
    rotary_cos: Array | None
    rotary_sin: Array | None
    rotary_interleaved: bool
    k_scale: Array | None
    v_scale: Array | None
    scale: float | None
    causal: bool
    window: Window | None
    softcap: float | None
    alibi_slopes: Array | None
    sink: Array | None
    num_splits: int | None
    out: Array | None


class RotaryOptions(TypedDict, total=False):
    """Those of `apply_rotary`."""

    positions: Array | None
    interleaved: bool
    inverse: bool
    out: Array | None
