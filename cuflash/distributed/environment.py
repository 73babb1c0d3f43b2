"""A group of the processes that mpirun, torchrun or Slurm started."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cuflash.errors import GroupError, UnsupportedError, ValueRangeError

from . import mesh
from .group import DEFAULT_TIMEOUT, Group
from .mpi import MpiGroup
from .nccl import NcclGroup, unique_id
from .nccl_library import library as find_library
from .peers import PeerGroup


class Process(NamedTuple):
    """This process among those that were started together.

    Attributes
    ----------
    rank, size : int
    local : int
        Its rank among those of this machine.
    is_one_machine : bool
        Whether it is known that all run on this machine.
    """

    rank: int
    size: int
    local: int
    is_one_machine: bool


TRANSPORTS = ("nccl", "peer")

# rank, size, local rank and processes of this machine: torchrun, Open MPI,
# MPICH, Slurm (which counts machines instead).
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None),
)
_MACHINES = "SLURM_NNODES"


def process() -> Process:
    """This process, from the environment variables of its launcher.

    Raises
    ------
    UnsupportedError
        If no launcher started it.
    """
    given = os.environ
    for rank, size, local, count in _NAMES:
        if rank in given and size in given:
            own = int(given[rank])
            if count is None:
                is_one_machine = given.get(_MACHINES) == "1"
            else:
                is_one_machine = given.get(count) == given[size]
            return Process(
                own, int(given[size]), int(given.get(local, own)),
                is_one_machine,
            )  # fmt: skip
    raise UnsupportedError(
        "no environment variables of a launcher, expected those of torchrun "
        "(RANK and WORLD_SIZE), mpirun or srun: start one process a GPU by "
        "one of them, or make a NcclGroup or an MpiGroup yourself"
    )


def group_from_environment(
    *,
    timeout: float = DEFAULT_TIMEOUT,
    library: str | None = None,
    transport: str | None = None,
) -> Group:
    """The group of the processes that a launcher started.

    With GPUs it is a `PeerGroup` or an `NcclGroup` on the device of this
    process's local rank, which becomes the current one; without, an `MpiGroup`
    for NumPy arrays.

    Parameters
    ----------
    timeout : float, optional
        Seconds that a rank waits for another.
    library : {None, "cupy", "nccl4py"}, optional
        As for `NcclGroup`.
    transport : {None, "nccl", "peer"}, optional
        How arrays travel between GPUs: by NCCL, or by a `PeerGroup`, for which
        all processes run on one machine. By default that is tried where the
        launcher says so and no library is given; else NCCL.

    Returns
    -------
    Group

    Raises
    ------
    UnsupportedError
        If no launcher started this process, or NCCL or mpi4py is missing.
    GroupError
        If the other processes do not join in time.

    Notes
    -----
    Rank 0 hands NCCL's id, or a folder's name, to the others: by
    torch.distributed if that is initialised, by mpi4py if that is imported,
    else by a file in the temporary folder, which all processes of one machine
    share.
    """
    if transport not in (None, *TRANSPORTS):
        raise ValueRangeError(
            f"transport is {transport!r}, expected one of "
            f"{', '.join(TRANSPORTS)}"
        )
    own = process()
    devices = count_devices()
    if not devices:
        return MpiGroup(timeout=timeout)
    import cupy

    cupy.cuda.Device(own.local % devices).use()
    if transport == "peer" or (
        transport is None
        and library is None
        and own.is_one_machine
        and sys.platform != "win32"
    ):
        with _shared(own, timeout, _new_folder) as folder:
            try:
                return _of_peers(own, folder, timeout)
            except UnsupportedError:  # on all ranks
                if transport == "peer":
                    raise
            # Here, as others may have yet to read what rank 0 made.
            return _of_nccl(own, timeout, library)
    return _of_nccl(own, timeout, library)


def _of_nccl(own: Process, timeout: float, library: str | None) -> NcclGroup:
    find_library(library)  # a rank without NCCL would wait for rank 0's id
    with _shared(own, timeout, lambda: unique_id(library)) as made:
        return NcclGroup(
            own.rank, own.size, made, timeout=timeout, library=library
        )


def _of_peers(own: Process, folder: bytes, timeout: float) -> PeerGroup:
    if not folder:
        raise UnsupportedError(
            "no temporary folder can hold sockets, expected one with a short "
            "name on a local disk: set TMPDIR, or use NCCL"
        )
    return PeerGroup(own.rank, own.size, os.fsdecode(folder), timeout=timeout)


def _new_folder() -> bytes:
    """A new folder for a `PeerGroup`, empty if none would do."""
    for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="cuflash_", dir=parent)
            # On Windows, PeerGroup says what is missing.
            if sys.platform == "win32" or mesh.can_listen(Path(folder)):
                return os.fsencode(folder)
            os.rmdir(folder)
    return b""


def count_devices() -> int:
    """How many GPUs this process sees; 0 without CuPy."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver, no device: all mean none
        return 0


@contextlib.contextmanager
def _shared(
    own: Process, timeout: float, make: Callable[[], bytes]
) -> Iterator[bytes]:
    """What rank 0 makes; all ranks have it when rank 0 leaves."""
    made = make() if own.rank == 0 else None
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        if torch.distributed.is_initialized():
            given: list[Any] = [made]
            torch.distributed.broadcast_object_list(given, src=0)
            yield given[0]
            return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.COMM_WORLD.size == own.size:
        yield mpi.COMM_WORLD.bcast(made)
        return
    file = _file()
    if made is None:
        yield _read(file, own.rank, timeout)
        return
    _write(file, made)
    try:
        yield made
    finally:
        file.unlink(missing_ok=True)


_count = itertools.count()


def _file() -> Path:
    """A file that the processes of one launcher know, and no others.

    They have one parent. Its process id and the time of its start tell it
    from earlier ones; the count, this group from earlier ones.
    """
    parent = os.getppid()
    try:
        stat = Path(f"/proc/{parent}/stat").read_text(
            encoding="utf-8", errors="replace"
        )
        since = stat.rpartition(")")[2].split()[19]
    except OSError:
        since = "0"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = (
        f"cuflash_id_{os.getuid()}_{parent}_{since}_{restarts}_{next(_count)}"
    )
    return Path(tempfile.gettempdir()) / name


def _write(file: Path, data: bytes) -> None:
    """Write a file that nobody else can write, and that appears as a whole."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    with os.fdopen(handle, "wb") as written:
        written.write(data)
    os.replace(name, file)


def _read(file: Path, rank: int, timeout: float) -> bytes:
    deadline = time.monotonic() + timeout
    while True:
        try:
            if file.stat().st_uid == os.getuid():
                return file.read_bytes()
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            raise GroupError(
                f"rank {rank} waited {timeout:g} s for rank 0 to make a "
                f"group: {file} did not appear. Processes on several "
                "machines need mpi4py or torch.distributed"
            )
        time.sleep(0.01)
