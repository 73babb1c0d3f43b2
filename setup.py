"""What setup.cfg cannot say: reference/, and README.md for package indexes.

reference/ is installed as cuflash.reference. Editable installs have only the
clone's folder on Python's path, and there `cuflash/_checkout.py` finds it. If
setup.cfg named it, setuptools would install an import hook instead. That comes
after all folders: Python started beside a clone named cuflash would import the
clone's folder, as a namespace package with nothing in it.

An index shows README.md, but has none of the files that it links to.
"""

import re
from configparser import ConfigParser
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parent
VERSION = run_path(str(ROOT / "cuflash" / "_version.py"))["__version__"]


def address():
    """Return where the project is published, or None: not yet."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    place = config["tool:cuflash"]["address"]
    return None if "/OWNER/" in place else place


def project_urls(place):
    """Return the links that an index lists beside the description."""
    return {
        "Source": place,
        "Documentation": f"{place}/tree/v{VERSION}/docs",
        "Changelog": f"{place}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{place}/issues",
    }


def description(text, place):
    """Return README's text with links to the files of this version.

    Without a place links become their text, and pictures go.
    """

    def link(found):
        picture, words, target = found.groups()
        if place is None:
            return "" if picture else words
        if target.startswith("#"):  # indexes name headings otherwise
            target = f"README.md{target}"
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({place}/{kind}/v{VERSION}/{target})"

    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:)([^)]*)\)", link, text)


def build():
    """Run the command that the build asks for."""
    # Here: Python comes without them, and a release is checked before.
    from setuptools import setup
    from setuptools.command.build_py import build_py

    class BuildWithReference(build_py):
        """Adds the package of the other folder to what is built."""

        def run(self):
            if not self.editable_mode:
                self.packages = [*self.packages, "cuflash.reference"]
                self.package_dir["cuflash.reference"] = "reference"
            super().run()

    place = address()
    setup(
        cmdclass={"build_py": BuildWithReference},
        long_description=description(
            (ROOT / "README.md").read_text(encoding="utf-8"), place
        ),
        long_description_content_type="text/markdown",
        project_urls=project_urls(place) if place else {},
    )


if __name__ == "__main__":
    build()
