"""Shared by the scripts' command lines: numbers, folders, Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
import tempfile
from pathlib import Path

STOPPED = 130  # the exit status after Ctrl-C: 128 + SIGINT


def number(text: str) -> int:
    """Read a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def positive(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def check_folder(
    parser: argparse.ArgumentParser, option: str, folder: Path
) -> None:
    """Exit with a usage error if a folder can't be created or written to.

    Called before anything is computed; does not create the folder.
    """
    there = folder.absolute()
    while not os.path.exists(there):
        there = there.parent
    try:
        if not os.path.isdir(there):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        parser.error(
            f"{option} {folder}: cannot write to {there} ({error.strerror})"
        )


def check_file(
    parser: argparse.ArgumentParser, option: str, file: Path
) -> None:
    """Exit with a usage error if a file can't be written."""
    if file.is_dir():
        parser.error(f"{option} {file}: is a folder, not a file")
    check_folder(parser, option, file.parent)


def stopped(what: str) -> int:
    """Print what Ctrl-C left behind; return the exit status."""
    print(f"stopped: {what}", file=sys.stderr, flush=True)
    return STOPPED
