"""Finds cuflash.reference in a checkout, where it stands beside cuflash/.

An installed package has it in its own folder, by package_dir in setup.cfg.
But Python started in a checkout takes the checkout's cuflash/ before anything
that is installed, and nothing in that folder is called reference. So the one
name that is elsewhere gets a finder.

Not ``cuflash.__path__``: with the checkout's root on it, tests/ and scripts/
would become packages of cuflash, and so would cuflash/ itself. Not a symbolic
link: Windows and source archives have none.
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
    """Knows where one package is."""

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
    """Have ``import cuflash.reference`` work in a checkout.

    The finder goes first: the finder of an editable install, which another
    checkout may have left in this environment, would answer with that
    checkout's reference.
    """
    in_place = (PACKAGE / "reference").is_dir()
    if not in_place and REFERENCE.is_file():
        sys.meta_path.insert(0, ReferenceFinder)
