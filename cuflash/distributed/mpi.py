"""A `Group` over MPI by mpi4py, for NumPy arrays: one rank a process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.errors import DTypeError, GroupError, UnsupportedError

from .group import DEFAULT_TIMEOUT, Group, Message, Pending


class MpiGroup(Group):
    """The ranks of a communicator of mpi4py.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm, optional
        MPI.COMM_WORLD by default.
    timeout : float, optional
        Seconds that a rank waits for another.

    Raises
    ------
    UnsupportedError
        If mpi4py cannot be imported.
    """

    def __init__(
        self, communicator: Any = None, *, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UnsupportedError(
                f"mpi4py could not be imported ({error}): pip install "
                '"cuflash[mpi]"'
            ) from error
        self._mpi = MPI
        self._communicator = communicator or MPI.COMM_WORLD
        super().__init__(
            self._communicator.rank, self._communicator.size, timeout
        )

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Any
    ) -> Pending:
        requests = []
        # Receives first: what then arrives need not be copied.
        for start, messages in (
            (self._communicator.Irecv, receives),
            (self._communicator.Isend, sends),
        ):
            for array, rank in messages:
                if not isinstance(array, np.ndarray):
                    raise DTypeError(
                        f"got an array of type {type(array).__name__}, "
                        "expected a NumPy array: the group communicates by "
                        "MPI"
                    )
                data = array.reshape(-1).view(np.uint8)
                requests.append(start([data, self._mpi.BYTE], rank))
        return _Requests(self, requests, (sends, receives))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        gathered = np.empty((self.size, len(data)), np.uint8)
        own = np.frombuffer(data, np.uint8)
        request = self._communicator.Iallgather(
            [own, self._mpi.BYTE], [gathered, self._mpi.BYTE]
        )
        self.await_all([request])
        return [row.tobytes() for row in gathered]

    def await_all(self, requests: list[Any]) -> None:
        """Wait until requests are complete."""
        deadline, delay = time.monotonic() + self.timeout, 0.0
        while not self._mpi.Request.Testall(requests):
            if time.monotonic() > deadline:
                raise GroupError(
                    f"rank {self.rank} waited {self.timeout:g} s for another "
                    "rank: it died, or made another call"
                )
            time.sleep(delay)
            delay = min(delay + 1e-6, 1e-3)


class _Requests:
    """The `Pending` of `MpiGroup`; keeps its arrays alive."""

    def __init__(
        self, group: MpiGroup, requests: list[Any], kept: Any
    ) -> None:
        self._group, self._requests, self._kept = group, requests, kept

    def wait(self) -> None:
        self._group.await_all(self._requests)
        self._requests, self._kept = [], None
