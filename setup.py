"""Installs reference/ as cuflash.reference; all else is in setup.cfg.

Editable installs have only the clone's folder on Python's path, and there
`cuflash/_checkout.py` finds reference/. If setup.cfg named it, setuptools
would install an import hook instead. That comes after all folders: Python
started beside a clone named cuflash would import the clone's folder, as a
namespace package with nothing in it.
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithReference(build_py):
    """Adds the package of the other folder to what is built."""

    def run(self):
        if not self.editable_mode:
            self.packages = [*self.packages, "cuflash.reference"]
            self.package_dir["cuflash.reference"] = "reference"
        super().run()


setup(cmdclass={"build_py": BuildWithReference})
