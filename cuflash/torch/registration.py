"""Registers cuflash with Hugging Face Transformers."""

from __future__ import annotations

import inspect

from cuflash.errors import ValueRangeError

# The oldest that is tested.
_NEEDS = (
    "register_transformers needs Hugging Face Transformers: pip install "
    "'transformers>=5.17'"
)


def register_transformers(name: str = "cu_attention") -> None:
    """Offer cuflash to Hugging Face models, as ``attn_implementation=name``.

    Registers an attention function and a mask function. Padding masks,
    causal masks, sliding windows and packed sequences become options of
    `attention`, so that kernels skip the pairs that they hide; any other mask
    is passed as a tensor. Softcaps, sinks, grouped heads, dropout, scales,
    ``cu_seq_lens_q`` and the keys that an indexer chooses are taken too. A
    keyword that is not known is refused when a model gives it. Models that
    Transformers runs by eager attention alone get eager's masks.

    Parameters
    ----------
    name : str, optional
        The key. It may not contain "flash": Transformers 5 takes such a name
        for a package to load.

    Raises
    ------
    ImportError
        If Transformers is not installed, or too old.
    ValueRangeError
        If the name contains "flash".
    """
    if "flash" in name:
        raise ValueRangeError(
            f"name is {name!r}, expected one without 'flash': Transformers "
            "takes such a name for a flash-attention package and loads that"
        )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        from . import masks, transformers
    except ImportError as error:
        raise ImportError(f"{_NEEDS} (which could not be imported)") from error
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"{_NEEDS} (an older one is installed)")
    AttentionInterface.register(name, transformers.attention_function)
    AttentionMaskInterface.register(name, masks.make)
