"""Small tensors that calls read where they run, as those of block masks.

A copy on each device stays with the tensor, so that later calls copy nothing:
a copy from the host waits, and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

_COPIES = "_cuflash_copies"


def placeable(x: torch.Tensor) -> torch.Tensor:
    """The tensor, which calls on any device read; nothing may change it."""
    setattr(x, _COPIES, {})
    return x


def is_placeable(x: torch.Tensor) -> bool:
    """Whether `placeable` returned it."""
    return hasattr(x, _COPIES)


def placed(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of `placeable` on a device."""
    copies: dict[torch.device, torch.Tensor] = getattr(x, _COPIES)
    found = copies.get(device)
    if found is None:
        with torch.inference_mode(False):  # calls with gradients save it
            found = x.to(device)
        # What a mode or a transform makes ends with it.
        if type(found) is torch.Tensor and not (
            torch._C._are_functorch_transforms_active()
        ):
            copies[device] = found
    return found
