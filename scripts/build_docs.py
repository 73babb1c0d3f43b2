"""Build the documentation site with Sphinx, from this checkout.

The pages of docs/, and README.md, CONTRIBUTING.md and CHANGELOG.md, are copied
to a folder from which Sphinx builds, with links rewritten for the site
(`site_parts.sources`). Warnings are errors. Nothing is downloaded. The API
page of a bridge whose extra is not installed has no functions; with CI set,
that is an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import command_line
from example_parts.running import in_checkout
from site_parts import sources, stubs

ROOT = Path(__file__).parents[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "docs",
        help="folder of the HTML pages (default: build/docs)",
    )
    parser.add_argument(
        "--keep-warnings",
        action="store_true",
        help="print warnings, and exit with 0 nevertheless",
    )
    args = parser.parse_args(argv)
    command_line.check_folder(parser, "--output", args.output)
    return build(args.output, not args.keep_warnings)


def build(output: Path, strict: bool = True) -> int:
    """Build the site; return Sphinx's exit status."""
    in_checkout()
    made = ROOT / "build" / "docs-sources"
    sources.copy(ROOT, made)
    lacking = ", ".join(f"cuflash[{x}]" for x in stubs.write_all(made))
    if lacking:
        print(f"API pages without functions: {lacking} is not installed")
        if os.environ.get("CI"):
            return 1
    # Imported here: it takes time, and nothing before this needs it.
    from sphinx.cmd.build import main as sphinx

    strictly = ["--fail-on-warning", "--keep-going"] if strict else []
    folders = ["-c", str(ROOT / "docs"), "-d", str(made.parent / "doctrees")]
    status = sphinx(["-q", *strictly, *folders, str(made), str(output)])
    if status == 0:
        print(f"built {output / 'index.html'}")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(command_line.stopped("a part of the pages"))
