"""An import finder for cuflash.reference in a checkout.

In an installed package, setup.py puts reference/ inside cuflash/. In a
checkout, reference/ is next to cuflash/, and Python imports that cuflash/ if
it is started in the checkout's root or the install is an editable one. The
finder makes ``cuflash.reference`` importable there.

Extending ``cuflash.__path__`` by the checkout's root would make tests/,
scripts/ and cuflash/ itself packages of cuflash. A symbolic link would not
work on Windows or in source archives.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
REFERENCE = PACKAGE.parent / "reference" / "__init__.py"


class ReferenceFinder:
    """Finds cuflash.reference, and nothing else."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name == "cuflash.reference":
            return spec_from_file_location(name, REFERENCE)
        return None


def find_reference() -> None:
    """Make ``import cuflash.reference`` work in a checkout.

    The finder goes first: another checkout's editable install may have left a
    finder in this environment, which would return that checkout's reference.
    """
    in_place = (PACKAGE / "reference").is_dir()
    if not in_place and REFERENCE.is_file():
        sys.meta_path.insert(0, ReferenceFinder)
