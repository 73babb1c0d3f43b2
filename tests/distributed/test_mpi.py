"""Ranks that are processes, by mpi4py."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cuflash
from cuflash import distributed

RANKS = Path(__file__).parents[1] / "helpers/mpi_ranks.py"


def mpiexec():
    """The command of the environment that runs the tests, or of PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@pytest.mark.parametrize("size", [2, 4])
def test_processes(size):
    command = mpiexec()
    is_there = importlib.util.find_spec("mpi4py") and command
    if not is_there and not os.environ.get("CI"):
        pytest.skip('no mpi4py or no mpiexec: pip install "cuflash[mpi]"')
    done = subprocess.run(
        [command, "-n", str(size), sys.executable, str(RANKS)],
        capture_output=True,
        text=True,
        timeout=300,
        # NumPy's arrays: a GPU would make it a group of NCCL.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is done") == size


def test_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(cuflash.UnsupportedError, match=r"cuflash\[mpi\]"):
        distributed.MpiGroup()
