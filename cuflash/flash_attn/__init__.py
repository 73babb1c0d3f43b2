"""flash-attn's functions, run by cuflash: for models written for flash-attn.

>>> import torch
>>> import cuflash.flash_attn as flash_attn
>>> q, k, v = torch.randn(3, 2, 16, 4, 8, requires_grad=True)
>>> flash_attn.flash_attn_func(q, k, v, causal=True).sum().backward()

The names, signatures, defaults and results are flash-attn 2's; keywords of
FlashAttention-3 that it lacks are taken too. ``docs/guide/flash_attn.md``
lists the differences.

Modules of this package import cuflash by its absolute name, so that
``sys.modules["flash_attn"] = cuflash.flash_attn`` makes all of them importable
under flash-attn's name.
"""

# First: it says which extra to install where PyTorch is missing.
import cuflash.torch  # noqa: F401
from cuflash.flash_attn import flash_attn_interface
from cuflash.flash_attn.flash_attn_interface import *  # noqa: F403

__all__ = ["__version__", *flash_attn_interface.__all__]

# The version of flash-attn whose interface this is: models compare it.
__version__ = "2.8.4"
