"""Compares results with what is expected, element by element."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuflash.check.expected import Expected


class Compared(NamedTuple):
    """A result beside what it must be.

    Attributes
    ----------
    name : str
    worst : float
        The largest error as a fraction of its bound; inf where one is NaN or
        infinite and the other is not.
    where : tuple of int
        The index of that element.
    got, want, most : float
        There: the result, the exact one and its bound.
    """

    name: str
    worst: float
    where: tuple[int, ...]
    got: float
    want: float
    most: float

    def __str__(self) -> str:
        return (
            f"{self.name}{list(self.where)} is {self.got:.7g}, expected"
            f" {self.want:.7g} within {self.most:.2g}"
        )


def compared(name: str, got: np.ndarray, expected: Expected) -> Compared:
    """The worst element of a result."""
    want, most = expected
    if got.shape != want.shape:
        return Compared(f"{name}: shape {got.shape}, not {want.shape}",
                        np.inf, (), np.nan, np.nan, np.nan)  # fmt: skip
    wide = got.astype(np.float64)
    with np.errstate(all="ignore"):
        ratio = np.abs(wide - want) / most
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    same = (wide == want) | (np.isnan(wide) & np.isnan(want))
    ratio = np.where(same, 0.0, ratio)
    if not ratio.size:
        return Compared(name, 0.0, (), np.nan, np.nan, np.nan)
    flat = int(np.argmax(ratio))
    where = tuple(int(i) for i in np.unravel_index(flat, ratio.shape))
    return Compared(
        name, float(ratio[where]), where, float(wide[where]),
        float(want[where]), float(np.broadcast_to(most, want.shape)[where]),
    )  # fmt: skip
