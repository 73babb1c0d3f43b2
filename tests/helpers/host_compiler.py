"""Whether kernels can be emulated here: whether there is a C++ compiler.

Where CI is set they must be, and the tests fail if there is none.
"""

import os

import pytest

from cuflash.backends.emulator import runtime
from cuflash.errors import CompileError


def find():
    """Return why there is no C++ compiler, '' if there is one."""
    try:
        runtime.host_compiler()
    except CompileError as error:
        return str(error)
    return ""


WHY_NONE = find()

needs_compiler = pytest.mark.skipif(
    bool(WHY_NONE) and not os.environ.get("CI"), reason=WHY_NONE
)
