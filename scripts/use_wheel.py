"""Install a wheel in a new environment and use it there, as a user would.

    python scripts/use_wheel.py dist/cuflash-0.1.0-py3-none-any.whl

The environment has the Python that runs this, and nothing but the wheel and
what it requires. README's examples and `python -m cuflash check` run there, in
an empty folder.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from fresh_environment import Failed, make_venv, run

SAY = """
print(f"README's examples ran, with {cuflash.__path__[0]}")
"""

README = Path(__file__).resolve().parents[1] / "README.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="cuflash_wheel_") as folder:
        try:
            use_wheel(wheel, Path(folder))
        except Failed as error:
            print(f"use_wheel: {error}", file=sys.stderr)
            return 1
    return 0


def use_wheel(wheel: Path, folder: Path, *options: str) -> None:
    """Make an environment in a folder, install the wheel, use it.

    The options are those of `python -m cuflash check`.

    Raises
    ------
    Failed
        If a step fails.
    """
    python = make_venv(folder / "environment", wheel)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    example = elsewhere / "readme.py"
    example.write_text(examples() + SAY, encoding="utf-8")
    run(python, "-m", "pip", "check", cwd=elsewhere)
    run(python, example, cwd=elsewhere)
    run(python, "-m", "cuflash", "info", cwd=elsewhere)
    run(python, "-m", "cuflash", "check", *options, cwd=elsewhere)


def examples() -> str:
    """Return README's Python, from top to bottom."""
    text = README.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


if __name__ == "__main__":
    sys.exit(main())
