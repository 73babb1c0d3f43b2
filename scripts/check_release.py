"""Say what a tag lacks before it may be published; see CONTRIBUTING.md.

python scripts/check_release.py v0.1.0
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tag")
    lacks = list(lacking(ROOT, parser.parse_args().tag))
    for sentence in lacks:
        print(f"check_release: {sentence}", file=sys.stderr)
    return int(bool(lacks))


def lacking(root: Path, tag: str) -> Iterator[str]:
    """Yield a sentence for each thing that is not as a release has it."""
    facts = run_path(str(root / "setup.py"))
    version = facts["VERSION"]
    if tag != f"v{version}":
        yield f"cuflash/_version.py says {version}, the tag {tag}"
    if facts["address"]() is None:
        yield "setup.cfg has no address yet: replace OWNER"
    recipe = text(root, "recipe/recipe.yaml")
    if f'version: "{version}"' not in recipe:
        yield f"recipe/recipe.yaml has another version than {version}"
    if "OWNER" in recipe:
        yield "recipe/recipe.yaml has no address or maintainer: replace OWNER"
    heading = rf"(?m)^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(heading, text(root, "CHANGELOG.md")):
        yield f"CHANGELOG.md has no heading '## {version} (year-month-day)'"
    for name in ("README.md", "docs/install.md"):
        if "not on a package index" in text(root, name).replace("\n", " "):
            yield f"{name} says that cuflash is not on a package index"


def text(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
