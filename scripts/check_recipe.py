"""Build the conda-forge recipe from an sdist, and run the recipe's tests.

    python scripts/check_recipe.py dist/cuflash-0.1.0.tar.gz

Needs py-rattler-build (pip) and a channel that has the recipe's packages:
conda-forge, unless ``--channel`` names another. Prints the sdist's sha256,
which the recipe needs once the same file is published.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipe" / "recipe.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--channel", default="conda-forge")
    parser.add_argument(
        "--output", type=Path, help="keep the conda package in this folder"
    )
    options = parser.parse_args()
    sdist = options.sdist.resolve()
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    print(f"sha256 of {sdist.name}: {digest}", flush=True)
    with tempfile.TemporaryDirectory(prefix="cuflash_recipe_") as name:
        recipe = Path(name) / "recipe.yaml"
        text = RECIPE.read_text(encoding="utf-8")
        recipe.write_text(of_file(text, sdist, digest), encoding="utf-8")
        try:
            packages = build(recipe, options.channel, Path(name) / "output")
        except ModuleNotFoundError as error:
            print(f"pip install py-rattler-build: {error}", file=sys.stderr)
            return 1
        for package in packages:
            print(f"built and tested {package.name}")
            if options.output:
                options.output.mkdir(parents=True, exist_ok=True)
                shutil.copy(package, options.output)
    return 0


def of_file(recipe: str, sdist: Path, digest: str) -> str:
    """Return the recipe with this sdist as its source."""
    source = f"  url: {sdist.as_uri()}"
    recipe, urls = re.subn(r"(?m)^  url: .*", source, recipe)
    sums = f'  sha256: "{digest}"'
    recipe, digests = re.subn(r'(?m)^  sha256: "\w+"', sums, recipe)
    assert urls == digests == 1
    return recipe


def build(recipe: Path, channel: str, output: Path) -> list[Path]:
    """Build and test with rattler-build; return the packages.

    Its log is printed.
    """
    from rattler_build import Stage0Recipe, ToolConfiguration
    from rattler_build.progress import SimpleProgressCallback

    results = Stage0Recipe.from_file(recipe).run_build(
        tool_config=ToolConfiguration(test_strategy="native"),
        output_dir=output,
        channels=[channel],
        progress_callback=SimpleProgressCallback(),
    )
    return [Path(package) for x in results for package in x.packages]


if __name__ == "__main__":
    sys.exit(main())
