"""Checks of arguments that the rest of cuflash does not make."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import DTypeError, type_name


def check_tensors(given: dict[str, Any]) -> None:
    """Raise DTypeError for an argument that has to be a tensor and is none."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise DTypeError(
                f"{name} is of type {type_name(x)}, expected a torch.Tensor: "
                "cuflash itself takes NumPy and CuPy arrays"
            )
