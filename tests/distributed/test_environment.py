"""Groups of the processes that a launcher started."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed import environment

LAUNCHERS = {
    "torchrun": {
        "RANK": 3,
        "WORLD_SIZE": 8,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
    },
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": 3,
        "OMPI_COMM_WORLD_SIZE": 8,
        "OMPI_COMM_WORLD_LOCAL_RANK": 1,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
    },
    "MPICH": {
        "PMI_RANK": 3,
        "PMI_SIZE": 8,
        "MPI_LOCALRANKID": 1,
        "MPI_LOCALNRANKS": 2,
    },
    "Slurm": {
        "SLURM_PROCID": 3,
        "SLURM_NTASKS": 8,
        "SLURM_LOCALID": 1,
        "SLURM_NNODES": 4,
    },
}


@pytest.fixture
def no_launcher(monkeypatch, tmp_path):
    for names in LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: tmp_path)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("of_machine", [2, 8])
def test_ranks_of_launchers(launcher, of_machine, no_launcher, monkeypatch):
    *others, (last, _) = LAUNCHERS[launcher].items()
    count = 8 // of_machine if launcher == "Slurm" else of_machine
    for name, value in (*others, (last, count)):
        monkeypatch.setenv(name, str(value))
    assert environment.process() == (3, 8, 1, of_machine == 8)


def test_without_a_launcher(no_launcher):
    with pytest.raises(cuflash.UnsupportedError, match="of a launcher"):
        distributed.group_from_environment()


def shared(rank, made, size=2, timeout=5.0):
    own = environment.Process(rank, size, rank, True)
    return environment._shared(own, timeout, lambda: made)


def test_an_id_by_a_file(no_launcher, monkeypatch, tmp_path):
    """One of which the other rank finds only the whole."""
    made = os.urandom(128)
    monkeypatch.setattr(environment, "_count", iter([0, 0]))
    got = []

    def read():
        with shared(1, None) as found:
            got.append(found)

    other = threading.Thread(target=read)
    other.start()
    with shared(0, made) as own:
        other.join()
        (file,) = tmp_path.iterdir()
        assert file.stat().st_mode & 0o077 == 0
    assert own == made and got == [made]
    assert not file.exists()


def test_no_id_in_time(no_launcher):
    with pytest.raises(cuflash.GroupError, match="waited 0.1 s for rank 0"):
        with shared(1, None, timeout=0.1):
            pass


@pytest.mark.parametrize("transport", [None, "peer"])
def test_gpus_that_cannot_read_each_other(
    no_launcher, tmp_path, monkeypatch, transport
):
    """Then NCCL takes their place, unless peers were asked for.

    Another rank may have read neither the folder's name nor NCCL's id.
    """

    def refuse(*given, **options):
        raise cuflash.UnsupportedError("cannot read")

    device = SimpleNamespace(use=lambda: None)
    cuda = SimpleNamespace(Device=lambda index: device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    for name, value in {
        "process": lambda: environment.Process(0, 1, 0, True),
        "count_devices": lambda: 1,
        "PeerGroup": refuse,
        "find_library": lambda name: None,
        "_new_folder": lambda: b"folder",
        "unique_id": lambda library: b"id",
        "NcclGroup": lambda *given, **options: sorted(
            x.read_bytes() for x in tmp_path.iterdir()
        ),
    }.items():
        monkeypatch.setattr(environment, name, value)
    if transport == "peer":
        with pytest.raises(cuflash.UnsupportedError, match="cannot read"):
            distributed.group_from_environment(transport=transport)
    else:
        assert distributed.group_from_environment() == [b"folder", b"id"]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("works", ["/tmp", None])
def test_a_temporary_folder_without_sockets(no_launcher, monkeypatch, works):
    """Another takes its place; if none does, peers are refused, not late."""
    folders = []

    def can_listen(folder):
        folders.append(folder)
        return str(folder.parent) == works

    monkeypatch.setattr(environment.mesh, "can_listen", can_listen)
    made = environment._new_folder()
    assert made == (os.fsencode(folders[-1]) if works else b"")
    assert [x for x in folders if x.exists()] == folders[-1:] * bool(works)
    if works:
        folders[-1].rmdir()
    else:
        with pytest.raises(cuflash.UnsupportedError, match="no temporary fol"):
            environment._of_peers(environment.Process(0, 2, 0, True), made, 1)
