"""New virtual environments, and commands in them, for the checks of a release.

None sees the checkout's modules: paths that the environment's variables name
are left out.
"""

from __future__ import annotations

import os
import subprocess
import time
import venv
from pathlib import Path


class Failed(Exception):
    """A step failed; the message is one line."""


def step(what: str) -> None:
    print(f"-- {time.strftime('%H:%M:%S')} {what}", flush=True)


def make_venv(folder: Path, *packages: object) -> Path:
    """Return the Python of a new environment with these packages."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "-q", *packages)
    return python


def run(
    *command: object,
    cwd: Path | None = None,
    fails: bool = False,
    quiet: bool = False,
) -> str:
    """Run a command and return its output; print it, unless `quiet`.

    Raises
    ------
    Failed
        If the command fails, or succeeds although `fails` is set.
    """
    ignored = ("PYTHONPATH", "MYPYPATH", "VIRTUAL_ENV")
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k not in ignored},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wrong = (done.returncode != 0) != fails
    if wrong or not quiet:
        print(done.stdout, end="", flush=True)
    if wrong:
        words = " ".join(str(w) for w in command if "\n" not in str(w))
        raise Failed(f"exit status {done.returncode} from {words}")
    return done.stdout
