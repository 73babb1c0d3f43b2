"""Seeds of dropout from torch's generator."""

from __future__ import annotations

import itertools

import torch
import torch._guards
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from cuflash.errors import UnsupportedError

_CPU = torch.device("cpu")
_numbers = itertools.count()


def draw() -> int:
    """A seed from the CPU's generator, which checkpointing restores too."""
    return int(_drawn(_CPU))


def _drawn(device: torch.device) -> torch.Tensor:
    """Such a seed as a tensor, int64 of shape ()."""
    return torch.empty((), dtype=torch.int64, device=device).random_()


def new_seed(number: int, *, device: torch.device) -> torch.Tensor:
    """The kernel of new_seed.

    Compilers merge equal nodes, even random ones that they do not know: each
    has a `number` of its own. `device` tells them which generator to restore
    where a checkpoint runs again.
    """
    return _drawn(device)


def dropout_seed(_: torch.Tensor) -> torch.Tensor:
    """What dropout_seed consists of: one new_seed, never computed again.

    With a small activation_memory_budget compiled code computes in its
    backward pass again what it did not save: another seed, for gradients of
    another pattern of dropout. Inside a checkpoint torch marks all nodes, and
    restores the generator.
    """
    if traceback.has_preserved_node_meta() and torch.is_grad_enabled():
        _check_that_it_is_kept()
    meta = traceback.current_meta  # of the node that is traced next
    before = meta.copy()
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return torch.ops.cuflash.new_seed(next(_numbers), device=_CPU)
    finally:
        meta.clear()
        meta.update(before)


def _check_that_it_is_kept() -> None:
    """Refuse where torch would compute a seed again whatever it is told."""
    from torch._functorch import config  # loads much, and here it is loaded

    if torch._guards.detect_fake_mode() is None:  # not traced: it runs
        raise UnsupportedError(
            "dropout is given without seed inside a checkpoint compiled with "
            'backend="eager", expected seed too: that backend does not '
            "restore generators where a checkpoint runs again (or the "
            'backend "aot_eager" or "inductor")'
        )
    if config.activation_memory_budget == 0:
        raise UnsupportedError(
            "dropout is given without seed, and "
            "torch._functorch.config.activation_memory_budget is 0, expected "
            "seed too: compiled code keeps not even a seed for its backward "
            "pass (or a budget above 0: 1e-6 keeps it)"
        )
