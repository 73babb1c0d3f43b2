"""Seeds of dropout from torch's generator."""

from __future__ import annotations

import torch


def draw() -> int:
    """A seed from the CPU's generator, which checkpointing restores too."""
    return int(drawn())


def drawn() -> torch.Tensor:
    """Such a seed as a tensor, int64 of shape ()."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_()
