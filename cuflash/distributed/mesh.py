"""Messages between the processes of one machine: a socket for each pair."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections import defaultdict, deque
from pathlib import Path

from cuflash.errors import GroupError, UnsupportedError

_FRAME = struct.Struct("<BQI")  # a message's kind, number and length
_RANK = struct.Struct("<I")

# `gather` sends so much at once: a few fit into the buffers of a socket.
_PIECE = 2**14

# What `bind` says to each rank alike: no sockets, or none in this folder.
# ENOENT: another rank has found that, and has removed the folder.
_NO_SOCKETS = {
    errno.EACCES,
    errno.EAFNOSUPPORT,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EROFS,
}


class Mesh:
    """Connections of a rank with all others.

    Messages of one kind and number arrive in the order in which they were
    sent.

    Parameters
    ----------
    rank, size : int
    folder : Path
        The same on all ranks, and no other group's; made if it is missing.
        Nobody else can write in it, and it is removed when all have joined,
        or when they cannot.
    timeout : float
        Seconds that a rank waits for another.

    Raises
    ------
    GroupError
        If the other ranks do not join in time.
    UnsupportedError
        On all ranks, if the folder cannot hold sockets.
    """

    def __init__(
        self, rank: int, size: int, folder: Path, timeout: float
    ) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self.rank, self.size, self.timeout = rank, size, timeout
        # By rank, kind and number.
        self._arrived: dict[tuple[int, int, int], deque[bytes]] = defaultdict(
            deque
        )
        own = folder / str(rank)
        deadline = time.monotonic() + timeout
        with _listener(folder, rank, size) as listener:
            try:
                for other in range(rank):
                    self._call(other, folder / str(other), deadline)
                while len(self._sockets) < size - 1:
                    self._answer(listener, deadline)
            except BaseException:
                self.close()
                raise
            finally:
                own.unlink(missing_ok=True)
                _remove(folder)

    def _call(self, other: int, path: Path, deadline: float) -> None:
        """Connect with a rank that listens, or soon will."""
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                link.close()
                if time.monotonic() > deadline:
                    raise self._late(other) from None
                time.sleep(0.01)
        link.settimeout(self.timeout)
        link.sendall(_RANK.pack(self.rank))
        self._sockets[other] = link

    def _answer(self, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            link, _ = listener.accept()
            link.settimeout(max(deadline - time.monotonic(), 1e-3))
            (other,) = _RANK.unpack(_exactly(link, _RANK.size))
        except TimeoutError:
            missing = {*range(self.size)} - {self.rank, *self._sockets}
            raise self._late(min(missing)) from None
        link.settimeout(self.timeout)
        self._sockets[other] = link

    def _late(self, other: int) -> GroupError:
        return GroupError(
            f"rank {self.rank} waited {self.timeout:g} s for rank {other} to "
            "join the group"
        )

    def send(self, rank: int, kind: int, data: bytes, number: int = 0) -> None:
        """Send a message to a rank; its kind is 0 to 255."""
        frame = _FRAME.pack(kind, number, len(data))
        try:
            self._sockets[rank].sendall(frame + data)
        except TimeoutError:
            raise self._silent(rank) from None
        except OSError as error:
            raise self._gone(rank) from error

    def receive(self, rank: int, kind: int, number: int = 0) -> bytes:
        """The next message of a kind and number of a rank; waits for it.

        Raises
        ------
        GroupError
            If it does not come in time, or the rank has left.
        """
        wanted = rank, kind, number
        while not self._arrived[wanted]:
            link = self._sockets[rank]
            try:
                frame = _exactly(link, _FRAME.size)
                *found, length = _FRAME.unpack(frame)
                data = _exactly(link, length)
            except TimeoutError:
                raise self._silent(rank) from None
            except OSError as error:
                raise self._gone(rank) from error
            self._arrived[rank, found[0], found[1]].append(data)
        data = self._arrived[wanted].popleft()
        if not self._arrived[wanted]:
            del self._arrived[wanted]
        return data

    def _silent(self, rank: int) -> GroupError:
        return GroupError(
            f"rank {self.rank} waited {self.timeout:g} s for rank {rank}: it "
            "died, or made another call"
        )

    def _gone(self, rank: int) -> GroupError:
        return GroupError(
            f"rank {self.rank} waits for rank {rank}, which has left the group"
        )

    def left(self) -> int | None:
        """A rank that has ended its connection, None if there is none."""
        for rank, link in self._sockets.items():
            # With a timeout `recv` first waits for data, whatever its flags.
            link.settimeout(0)
            try:
                if not link.recv(1, socket.MSG_PEEK):
                    return rank
            except BlockingIOError:
                pass
            except OSError:
                return rank
            finally:
                link.settimeout(self.timeout)
        return None

    def gather(self, kind: int, data: bytes) -> list[bytes]:
        """Bytes of each rank.

        They travel in pieces, and ranks receive between: two that only sent
        would wait for each other once the sockets are full. A piece that is
        short, or empty, is the last.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = {rank: bytearray() for rank in others}
        awaited, start = others, 0
        while awaited or start <= len(data):
            if start <= len(data):
                for rank in others:
                    self.send(rank, kind, data[start : start + _PIECE])
            start += _PIECE
            pieces = {rank: self.receive(rank, kind) for rank in awaited}
            for rank, piece in pieces.items():
                found[rank] += piece
            awaited = [x for x in awaited if len(pieces[x]) == _PIECE]
        found[self.rank] = bytearray(data)
        return [bytes(found[rank]) for rank in range(self.size)]

    def close(self) -> None:
        """End all connections."""
        for link in self._sockets.values():
            link.close()
        self._sockets.clear()

    def __del__(self) -> None:
        self.close()


def _exactly(link: socket.socket, count: int) -> bytes:
    """That many bytes; ConnectionError if the other side ends before."""
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was ended")
        data += more
    return data


def can_listen(folder: Path) -> bool:
    """Whether an empty folder can hold the sockets of any group."""
    last = 99_999
    try:
        _listener(folder, last, last + 1).close()
    except (GroupError, UnsupportedError):
        return False
    (folder / str(last)).unlink()
    return True


def _listener(folder: Path, rank: int, size: int) -> socket.socket:
    """A socket that others find in a folder, which is made."""
    # All ranks or none: the last one's name is the longest.
    longest = len(os.fsencode(folder / str(size - 1)))
    if longest > 103:  # what macOS allows; Linux, 107
        raise UnsupportedError(
            f"{folder} has too long a name to hold sockets: "
            f"{longest} bytes with a rank's, expected at most 103"
        )
    with contextlib.ExitStack() as closing:
        try:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            closing.callback(made.close)
            _make_private(folder)
            made.bind(str(folder / str(rank)))
            made.listen(size)
        except OSError as error:
            _remove(folder)
            alike = error.errno in _NO_SOCKETS
            kind = UnsupportedError if alike else GroupError
            raise kind(f"{folder} cannot hold sockets: {error}") from error
        closing.pop_all()
    return made


def _remove(folder: Path) -> None:
    """Remove a folder unless another rank uses it, or has removed it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can use."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.stat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise GroupError(f"{folder} can be used by others, expected a new one")
