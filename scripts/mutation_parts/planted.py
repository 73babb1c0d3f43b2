"""A plugin of pytest: the emulated tests, on kernels from another folder.

    CUFLASH_PLANTED=folder pytest -p mutation_parts.planted -x -k emulated

The folder has ``kernels``. Tests with the words of CUFLASH_FIRST in their
names are run before the others. What the first that fails said goes to
``failed.json`` in that folder.
"""

import functools
import json
import os
from pathlib import Path

from hypothesis import Phase, settings

from cuflash import source

FOLDER = Path(os.environ["CUFLASH_PLANTED"])
FIRST = os.environ.get("CUFLASH_FIRST", "").split()


def pytest_configure():
    """Put the folder in the kernels' place; look for no smaller example."""
    source.build = functools.partial(source.build, folder=FOLDER / "kernels")
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("planted", settings.default, phases=phases)
    settings.load_profile("planted")


def pytest_collection_modifyitems(items):
    """Run what is most likely to fail first."""
    items.sort(key=lambda item: sum(x not in item.nodeid for x in FIRST))


def pytest_runtest_logreport(report):
    """Note the first failure."""
    file = FOLDER / "failed.json"
    if report.failed and not file.exists():
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if crash else str(report.longrepr)
        file.write_text(json.dumps({"test": report.nodeid, "said": said}))
