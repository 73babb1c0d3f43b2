"""Types of results, for the overloads that tell them."""

import torch

__all__ = ["Results"]

Results = tuple[torch.Tensor, torch.Tensor]  # out and lse
