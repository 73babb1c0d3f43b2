"""Groups of the processes that a launcher started."""

import os
import threading

import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed import environment

LAUNCHERS = {
    "torchrun": {"RANK": 3, "WORLD_SIZE": 8, "LOCAL_RANK": 1},
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": 3,
        "OMPI_COMM_WORLD_SIZE": 8,
        "OMPI_COMM_WORLD_LOCAL_RANK": 1,
    },
    "MPICH": {"PMI_RANK": 3, "PMI_SIZE": 8, "MPI_LOCALRANKID": 1},
    "Slurm": {"SLURM_PROCID": 3, "SLURM_NTASKS": 8, "SLURM_LOCALID": 1},
}


@pytest.fixture
def no_launcher(monkeypatch, tmp_path):
    for names in LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: tmp_path)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_launchers(launcher, no_launcher, monkeypatch):
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, str(value))
    assert environment.process() == (3, 8, 1)


def test_without_a_launcher(no_launcher):
    with pytest.raises(cuflash.UnsupportedError, match="of a launcher"):
        distributed.group_from_environment()


def shared(rank, size=2, timeout=5.0):
    own = environment.Process(rank, size, rank)
    return environment._share(own, timeout, None)


def test_an_id_by_a_file(no_launcher, monkeypatch):
    """One of which the other rank finds only the whole."""
    made = os.urandom(128)
    monkeypatch.setattr(environment, "unique_id", lambda library: made)
    monkeypatch.setattr(environment, "_count", iter([0, 0]))
    got = []
    other = threading.Thread(target=lambda: got.append(shared(1).id))
    other.start()
    first = shared(0)
    other.join()
    assert first.id == made and got == [made]
    assert first.file.stat().st_mode & 0o077 == 0


def test_no_id_in_time(no_launcher):
    with pytest.raises(cuflash.GroupError, match="waited 0.1 s for rank 0"):
        shared(1, timeout=0.1)
