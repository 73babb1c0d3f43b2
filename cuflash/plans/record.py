"""One record a family of kernels: what the rest of cuflash asks about it.

Whoever runs a plan asks the record of its family, never the family's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cuflash.request import layouts
from cuflash.request.layouts import Layout
from cuflash.settings import FamilyName as FamilyName

_VECTOR = 16  # bytes of the widest load


@dataclass(frozen=True)
class Family:
    """What is true of all kernels of a family.

    Attributes
    ----------
    name : str
        In plans, messages and the environment variable ``CUFLASH_FAMILY``:
        the folder of its kernels and, if another family's are there too,
        what tells them apart.
    entry : str
        How the names of its kernels' entries end; by default by its name.
    loads_by_tma : bool
        Whether inputs and gradients have a TensorMap.
    adds_to_dq : bool
        Whether blocks add to dq itself; prepare/delta.cu zeroes it before.
    splits_keys : bool
        Whether several blocks share a row's keys.
    may_spill : bool
        Whether registers may be spilled; not beside tensor cores.
    loads : str
        How inputs' rows are read: by ``"vectors"`` of 16 bytes, by
        ``"elements"`` of 4 or 8 bytes, or by ``"divisors"``, the widest
        vectors that divide a row.
    multiplies : str
        What multiplies its matrices: ``"cores"``, CUDA's, or tensor
        cores by ``"mma_16"``, ``"mma_float64"`` or ``"mma_tf32"``.
    """

    name: FamilyName
    entry: str = ""
    loads_by_tma: bool = False
    adds_to_dq: bool = False
    splits_keys: bool = False
    may_spill: bool = True
    loads: Literal["vectors", "elements", "divisors"] = "vectors"
    multiplies: Literal["cores", "mma_16", "mma_float64", "mma_tf32"] = "cores"

    @property
    def folder(self) -> str:
        """The folder of its kernels, in ``kernels/``."""
        return self.name.partition("_")[0]

    def readable(self, given: Layout, by_tma: bool = True) -> Layout:
        """Return the layout of an input if kernels can read it, or a copy's.

        by_tma : False for an input without a TensorMap.
        """
        alignment = self.row_alignment(given.dtype.itemsize, given.shape[-1])
        return layouts.readable(given, alignment, self.loads_by_tma and by_tma)

    def row_alignment(self, itemsize: int, columns: int) -> int:
        """Return the alignment in bytes that inputs' rows need."""
        # simt reads 16-bit elements one by one, prepare/delta.cu does not.
        if self.loads == "elements" and itemsize > 2:
            return itemsize
        if self.loads == "divisors":
            return math.gcd(_VECTOR, itemsize * columns)
        return _VECTOR


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "sm90", may_spill=False, loads_by_tma=True, multiplies="mma_16"
        ),
        Family("sm80", may_spill=False, multiplies="mma_16"),
        Family("decode", splits_keys=True, multiplies="mma_16"),
        Family("decode_sm90", splits_keys=True, multiplies="mma_16"),
        Family("decode_simt", splits_keys=True, loads="divisors"),
        Family("fma", adds_to_dq=True),
        Family(
            "mma8_float64",
            entry="mma8",
            may_spill=False,
            adds_to_dq=True,
            multiplies="mma_float64",
        ),
        Family(
            "mma8_float32",
            entry="mma8",
            may_spill=False,
            adds_to_dq=True,
            multiplies="mma_tf32",
        ),
        Family("simt", loads="elements"),
    )
}


def must_not_spill(file: str) -> bool:
    """Whether a kernel, by its file, keeps all it holds in registers."""
    folders = {x.folder for x in FAMILIES.values() if not x.may_spill}
    return file.partition("/")[0] in folders
