"""Trains a potential on forces with Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import morse, potential

HEADS, HIDDEN = 8, 32
BATCH, UNSEEN = 16, 8  # configurations
RATE = 0.02


def train(
    calls: Any,
    atoms: int,
    steps: int,
    tell: Callable[[int, float, float], None],
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Train a new potential.

    Returns
    -------
    errors : array, (steps, 3)
        Step, and the root mean square error of forces in training and of
        unseen configurations, of which 1 is that of no force at all.
    unseen : tuple of array
        Their forces after training, and those wanted.
    """
    r, unseen = (
        morse.configurations(number, atoms, seed)
        for seed, number in enumerate((BATCH, UNSEEN))
    )
    target, expected = morse.forces(r), morse.forces(unseen)
    parameters = potential.new_parameters(HEADS, HIDDEN, seed=2)
    optimizer = _Adam(parameters)
    size, errors = np.sqrt((target**2).mean()), []
    forces = np.zeros_like(expected)
    for number in range(1, steps + 1):
        loss, gradients, _ = potential.step(parameters, r, target, calls)
        if number in (1, steps) or number % 10 == 0:
            missed, _, forces = potential.step(
                parameters, unseen, expected, calls
            )
            errors.append((number, *(np.sqrt((loss, missed)) / size)))
            tell(*errors[-1])
        rate = RATE * 0.5 * (1 + np.cos(np.pi * number / steps))
        optimizer.move(parameters, gradients, rate)
    return np.array(errors), (forces, expected)


class _Adam:
    def __init__(self, parameters: potential.Parameters) -> None:
        self.number = 0
        self.mean = {n: np.zeros_like(x) for n, x in parameters.items()}
        self.square = {n: np.zeros_like(x) for n, x in parameters.items()}

    def move(
        self,
        parameters: potential.Parameters,
        gradients: potential.Parameters,
        rate: float,
    ) -> None:
        """Take a step, in place."""
        self.number += 1
        for name, x in gradients.items():
            mean, square = self.mean[name], self.square[name]
            mean += 0.1 * (x - mean)
            square += 0.01 * (x**2 - square)
            first = mean / (1 - 0.9**self.number)
            second = square / (1 - 0.99**self.number)
            parameters[name] -= rate * first / (np.sqrt(second) + 1e-8)
