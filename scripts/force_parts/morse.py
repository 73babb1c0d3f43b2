"""Configurations of atoms, and the forces to learn: Morse's pair potential."""

from __future__ import annotations

import numpy as np

DISTANCE = 1.1  # of the least energy of a pair
STIFFNESS = 2.0  # of a pair at that distance, by its width
SPACING = 1.2  # of the lattice


def configurations(number: int, atoms: int, seed: int) -> np.ndarray:
    """Positions near a cubic lattice's, (number, atoms, 3)."""
    rng = np.random.default_rng(seed)
    side = int(np.ceil(atoms ** (1 / 3) - 1e-9))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3), -1).reshape(-1, 3)
    lattice = SPACING * (grid[:atoms] - (side - 1) / 2)
    return lattice + 0.12 * rng.standard_normal((number, atoms, 3))


def energy(r: np.ndarray) -> float:
    """The sum of (1 - exp(-c (d - d0)))^2 over all pairs."""
    apart = r[:, :, None] - r[:, None]
    pairs = np.triu_indices(r.shape[1], 1)
    distance = np.sqrt((apart**2).sum(-1))[:, pairs[0], pairs[1]]
    return float(((1 - np.exp(-STIFFNESS * (distance - DISTANCE))) ** 2).sum())


def forces(r: np.ndarray) -> np.ndarray:
    """Minus the slopes of `energy`."""
    apart = r[:, :, None] - r[:, None]
    distance = np.sqrt((apart**2).sum(-1))
    decay = np.exp(-STIFFNESS * (distance - DISTANCE))
    slope = 2 * STIFFNESS * decay * (1 - decay)
    np.einsum("bii->bi", distance)[...] = 1  # an atom and itself: 0 / 1
    np.einsum("bii->bi", slope)[...] = 0
    return -np.einsum("bij,bijx->bix", slope / distance, apart)
