"""Whether kernels can be emulated here: on Linux, with a C++ compiler.

Where CI is set, a Linux without one fails the tests.
"""

import os
import sys

import pytest

from cuflash.backends.emulator import runtime
from cuflash.errors import CompileError, UnsupportedError


def find():
    """Return why there is no emulator, '' if there is one."""
    try:
        runtime.check_system()
        runtime.host_compiler()
    except (CompileError, UnsupportedError) as error:
        return str(error)
    return ""


WHY_NONE = find()

needs_compiler = pytest.mark.skipif(
    bool(WHY_NONE)
    and not (os.environ.get("CI") and sys.platform.startswith("linux")),
    reason=WHY_NONE,
)
