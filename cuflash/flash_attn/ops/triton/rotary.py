"""`apply_rotary`, under the name of flash-attn's module."""

from cuflash.flash_attn.rotation import apply_rotary

__all__ = ["apply_rotary"]
