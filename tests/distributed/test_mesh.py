"""Messages between processes: order, ranks that leave or do not come."""

import errno
import socket
import threading
import time

import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed.mesh import _PIECE, Mesh, can_listen


def run(function, folder, size=2, timeout=20.0):
    def of_rank(board):
        mesh = Mesh(board.rank, size, folder, timeout)
        try:
            return function(mesh)
        finally:
            mesh.close()

    return distributed.run_threads(size, of_rank)


def test_kinds_and_numbers_have_an_order_each(tmp_path):
    def of_rank(mesh):
        other = 1 - mesh.rank
        sent = [(1, b"a"), (2, b""), (1, b"b" * 5000), (1, b"c", 7)]
        for kind, data, *number in sent:
            mesh.send(other, kind, data, *number)
        wanted = [(1, 7), (2,), (1,), (1,)]
        return [mesh.receive(other, *x) for x in wanted]

    folder = tmp_path / "new"
    assert run(of_rank, folder) == [[b"c", b"", b"a", b"b" * 5000]] * 2
    assert not folder.exists()


def test_bytes_of_all(tmp_path):
    found = run(lambda x: x.gather(0, b"%d" % x.rank), tmp_path / "new", 4)
    assert found == [[b"0", b"1", b"2", b"3"]] * 4


@pytest.mark.parametrize("size", [_PIECE - 1, _PIECE, 2**20])
def test_more_bytes_than_sockets_hold(tmp_path, size):
    """Of one rank fewer; nothing is left for the next call."""

    def of_rank(mesh):
        data = b"%d" % mesh.rank * (size if mesh.rank else 1)
        return mesh.gather(0, data), mesh.gather(0, b"end")

    found = run(of_rank, tmp_path / "new", 3, timeout=5.0)
    assert found == [([b"0", b"1" * size, b"2" * size], [b"end"] * 3)] * 3


def test_ranks_that_work_have_not_left(tmp_path):
    """Asked without a wait for what they send, so long before the timeout."""

    def of_rank(mesh):
        start = time.monotonic()
        left = mesh.left()
        spent = time.monotonic() - start
        mesh.gather(0, b"")
        return left, spent < mesh.timeout / 2

    assert run(of_rank, tmp_path / "new") == [(None, True)] * 2


def test_a_rank_that_leaves(tmp_path):
    with pytest.raises(cuflash.GroupError, match="rank 1, which has left"):
        run(lambda x: x.rank or x.receive(1, 0), tmp_path / "new")


def test_a_rank_that_is_silent(tmp_path):
    both = threading.Barrier(2, timeout=20.0)

    def of_rank(mesh):
        with pytest.raises(cuflash.GroupError, match=r"waited 0.2 s for rank"):
            mesh.receive(1 - mesh.rank, 0)
        both.wait()  # as silence is not to have left

    run(of_rank, tmp_path / "new", timeout=0.2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_join(tmp_path, rank):
    with pytest.raises(cuflash.GroupError, match=f"for rank {1 - rank} to"):
        Mesh(rank, 2, tmp_path / "new", 0.1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("rank", [0, 10])
def test_a_folder_with_a_long_name(tmp_path, rank):
    """Too long for the last rank, and so for all; not for one rank fewer."""
    folder = tmp_path / ("x" * (100 - len(bytes(tmp_path))))
    with pytest.raises(cuflash.UnsupportedError, match="expected at most 103"):
        Mesh(rank, 11, folder, 0.1)
    with pytest.raises(cuflash.GroupError, match="to join the group"):
        Mesh(rank and 9, 10, folder, 0.1)
    assert not folder.exists()


def test_whether_a_folder_can_hold_sockets(tmp_path):
    """It is as it was, for the group."""
    good, long = tmp_path / "good", tmp_path / ("x" * 100)
    for folder in (good, long):
        folder.mkdir(mode=0o700)
        assert can_listen(folder) == (folder == good)
        assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.EPERM, cuflash.UnsupportedError),
        (errno.EADDRINUSE, cuflash.GroupError),  # not so on all ranks
    ],
)
def test_a_folder_without_sockets(tmp_path, monkeypatch, number, error):
    def bind(self, name):
        raise OSError(number, "no such socket")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(error, match="cannot hold sockets: .* no such"):
        Mesh(0, 2, tmp_path / "new", 0.1)
    assert not (tmp_path / "new").exists()


def test_a_folder_of_others(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(cuflash.GroupError, match="can be used by others"):
        Mesh(0, 2, tmp_path, 1.0)
