"""Registers cuflash with Hugging Face Transformers."""

from __future__ import annotations

from cuflash.errors import ValueRangeError


def register_transformers(name: str = "cu_attention") -> None:
    """Offer cuflash to Hugging Face models, as ``attn_implementation=name``.

    Registers an attention function and a mask function. Padding masks,
    causal masks, sliding windows and packed sequences become options of
    `attention`, so that kernels skip the pairs that they hide; any other mask
    is passed as a tensor. Softcaps, sinks, grouped heads, dropout, scales and
    ``cu_seq_lens_q`` are taken too.

    Parameters
    ----------
    name : str, optional
        The key. It may not contain "flash": Transformers 5 takes such a name
        for a package to load.

    Raises
    ------
    ImportError
        If Transformers 5 is not installed.
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

        from . import masks, transformers
    except ImportError as error:
        raise ImportError(
            "register_transformers needs Hugging Face Transformers 5, which "
            "could not be imported: pip install 'transformers>=5'"
        ) from error
    AttentionInterface.register(name, transformers.attention_function)
    AttentionMaskInterface.register(name, masks.make)
