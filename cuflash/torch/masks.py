"""Masks of Transformers as patterns, so that kernels skip what is hidden.

Transformers describes a mask by a function of indices. Those that cuflash has
options for become a `Mask`, which takes no memory of seqlen_q * seqlen_k;
all others, and all masks of compiled calls, become the tensor that its own
"sdpa" makes. A model that may add masks to scores itself gets those that its
own "eager" makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils import logging

from .eager_models import adds_masks, calls_cuflash

_logger = logging.get_logger("cuflash.torch")

Window = tuple[int | None, int | None]


class Mask:
    """A mask of (batch, 1, seqlen_q, seqlen_k), known by its pattern.

    Wherever a model uses it as a tensor, it becomes one.

    Attributes
    ----------
    causal : bool
        The last query is at the position of key ``num_keys - 1``.
    window : tuple
        As in `attention`.
    num_keys : int
        Later keys are hidden.
    ids_q, ids_k : Tensor or None
        Segment ids, (batch, seqlen).
    """

    ndim = 4

    def __init__(
        self,
        tensor: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        causal: bool,
        window: Window,
        num_keys: int,
        ids_q: torch.Tensor | None = None,
        ids_k: torch.Tensor | None = None,
    ) -> None:
        self._tensor, self.shape = tensor, torch.Size(shape)
        self.causal, self.window, self.num_keys = causal, window, num_keys
        self.ids_q, self.ids_k = ids_q, ids_k

    def tensor(self) -> torch.Tensor:
        """The mask as a bool tensor, True where a query sees a key."""
        return self._tensor()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(x: Any) -> Any:
            return x.tensor() if isinstance(x, Mask) else x

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs))
        return function(*args, **(kwargs or {}))


def make(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **more: Any,
) -> Any:
    """A mask, as `transformers.masking_utils` asks for it.

    None stands for no mask in a bidirectional module, and in compiled calls
    for a causal mask too; windows wider than the keys are none.
    """
    if isinstance(attention_mask, Mask):  # generate() has made it
        return attention_mask

    def tensor(*skips: bool, maker: Any = masking_utils.sdpa_mask) -> Any:
        causal, bidirectional = skips or (False, False)
        return maker(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=causal,
            allow_is_bidirectional_skip=bidirectional,
            **more,
        )

    config = more.get("config")
    if config is not None and adds_masks(type(config)):
        if not calls_cuflash(type(config)):
            _logger.warning_once(
                f"models of {type(config).__name__} compute attention by "
                "code of their own: cuflash is not called"
            )
        return tensor(maker=masking_utils.eager_mask)
    if masking_utils.is_tracing(attention_mask):
        # A causal mask that is left out is aligned at the start there.
        same = q_length == kv_length or q_length == 1
        return tensor(
            allow_is_causal_skip and same, allow_is_bidirectional_skip
        )
    pattern = recognise(mask_function)
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    # Static caches forbid to skip masks that they keep for compiled code.
    if pattern is None or not (may_skip or pattern.ids is not None):
        return tensor()
    hidden = kv_offset + kv_length - (int(q_offset) + q_length)
    ordered = pattern.causal or pattern.window != (None, None)
    if ordered and hidden and (hidden < 0 or not pattern.causal):
        return tensor()
    num_keys = kv_length - hidden if ordered else kv_length
    ids_q = ids_k = pattern.ids
    padding = _padding(attention_mask, kv_length, kv_offset, num_keys)
    if padding is not None:
        if pattern.ids is not None:  # a pair of ids holds one of them
            return tensor()
        ids_k = padding.to(torch.int32)
        ids_q = ids_k.new_ones((batch_size, q_length))
    left, right = pattern.window
    window = (
        None if left is None or left >= num_keys - 1 else left,
        None if right is None or right >= q_length - 1 else right,
    )
    hides = ids_q is not None or window != (None, None)
    if not (pattern.causal or hides) and allow_is_bidirectional_skip:
        return None
    shape = (batch_size, 1, q_length, kv_length)
    return Mask(tensor, shape, pattern.causal, window, num_keys, ids_q, ids_k)


def _padding(
    attention_mask: torch.Tensor | None,
    kv_length: int,
    kv_offset: int,
    num_keys: int,
) -> torch.Tensor | None:
    """Which keys are tokens, (batch, num_keys); None if all are."""
    padding = masking_utils.prepare_padding_mask(
        attention_mask, kv_length, kv_offset
    )
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + num_keys]
    return None if bool(padding.all()) else padding


@dataclass(frozen=True)
class Pattern:
    """What a function of indices shows; ids are of queries and keys alike."""

    causal: bool
    window: Window = (None, None)
    ids: torch.Tensor | None = None


def recognise(mask_function: Callable) -> Pattern | None:
    """The pattern of a mask function; None if cuflash has no options for it.

    Functions of `transformers.masking_utils` are recognised by their names
    and closures. The mask of any other becomes a tensor.
    """
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern(causal=False)
    name, held = _named(mask_function)
    if name != "and_masks" or len(held.get("mask_functions", ())) != 2:
        return None
    first, second = held["mask_functions"]
    packed, packs = _named(second)
    if packed == "packed_sequence_mask_function":
        name, held = _named(first)
        if name == "remap_positions_for_packed_sequence":
            first = held["mask_function"]  # the same within a sequence
        inner = recognise(first)
        if inner is None or inner.ids is not None:
            return None
        ids = packs["packed_sequence_mask"].to(torch.int32)
        return Pattern(inner.causal, inner.window, ids)
    name, held = _named(first)
    if name == "sliding_window_overlay":
        if second is masking_utils.causal_mask_function:
            return Pattern(True, (held["sliding_window"] - 1, None))
    elif name == "sliding_window_bidirectional_overlay":
        if second is masking_utils.bidirectional_mask_function:
            return Pattern(False, (held["sliding_window"],) * 2)
    return None


def _named(mask_function: Any) -> tuple[str, dict[str, Any]]:
    """The function that made a mask function, and what it holds."""
    maker, _, _ = getattr(mask_function, "__qualname__", "").partition(".<")
    if getattr(mask_function, "__module__", "") != masking_utils.__name__:
        return "", {}
    return maker, dict(inspect.getclosurevars(mask_function).nonlocals)
