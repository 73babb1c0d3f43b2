"""Processes that copy from each other, on one GPU or on two."""

import json
import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "cuflash.distributed.bench"]
OPTIONS = "--processes 2 --seqlens 4096 --repeats 1 --timeout 60"


@pytest.mark.gpu
def test_two_processes(tmp_path):
    """The result is that of one call, but for roundings to bfloat16.

    A block's result is rounded once before it is merged, which is rounded
    again, as is one call's: three half units, of 2^-8 of the largest element.
    Gradients are sums of two rounded ones. Other keys are off by as much as
    the largest element.
    """
    file = tmp_path / "cells.json"
    options = [*OPTIONS.split(), "--transport", "peer", "--json", str(file)]
    done = subprocess.run(
        [*COMMAND, *options],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "CUFLASH_COMPILE": "lazy"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = json.loads(file.read_text())["cells"]
    assert cell["largest_error"] <= 4 * 2.0**-8
