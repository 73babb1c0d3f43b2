"""The public name of the emulator: see `cuflash.backends.emulator`."""

from .backends.emulator import active, current

__all__ = ["active", "current"]
