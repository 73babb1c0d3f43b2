"""PeerGroup with a stand-in for CuPy: threads are its processes."""

import threading

import numpy as np
import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed import machine, peers, ring
from helpers import peer_device
from helpers.compare import assert_elements


@pytest.fixture
def on_ranks(monkeypatch, tmp_path):
    """Runs a function on ranks; `changed` is of CuPy's runtime."""

    def run(function, size=2, timeout=20.0, **changed):
        module = type("module", (), {"cupy": peer_device.cupy(**changed)})
        monkeypatch.setattr(peers.api_arrays, "on_cuda", lambda: module)

        def of_rank(board):
            group = distributed.PeerGroup(
                board.rank, size, tmp_path / "group", timeout=timeout
            )
            try:
                result = function(group)
                group.close()
            finally:
                group._mesh.close()
            return result

        return distributed.run_threads(size, of_rank)

    return run


def array(*values):
    return np.array(values, np.float32).view(peer_device.Array)


def test_arrays_to_each_other(on_ranks):
    """Each as it was when it was sent."""

    def of_rank(group):
        other = 1 - group.rank
        sent = [array(10 * group.rank), array(group.rank, 5)]
        got = [array(0), array(0, 0)]
        pending = group.exchange(
            [(x, other) for x in sent], [(x, other) for x in got]
        )
        sent[0][:] = -1
        pending.wait()
        return [x.tolist() for x in got]

    assert on_ranks(of_rank) == [[[10], [1, 5]], [[0], [0, 5]]]


def test_what_is_sent_twice_is_copied_once(on_ranks):
    """Its memory is used again when nobody holds it."""

    def of_rank(group):
        other = 1 - group.rank
        held, got = group.sendable(array(group.rank, 2)), array(0, 0)
        for _ in range(2):
            group.exchange([(held, other)], [(got, other)]).wait()
            assert len(group._lent) == 1
        del held
        assert not len(group._lent)
        return got.tolist(), [len(x) for x in group._blocks.free.values()]

    assert on_ranks(of_rank) == [([1, 2], [1]), ([0, 2], [1])]


def test_a_rank_that_leaves(on_ranks, monkeypatch):
    """Whoever waits on the GPU for it does so no longer than the timeout."""
    monkeypatch.setattr(peer_device.Event, "done", False, raising=False)

    def of_rank(group):
        if group.rank == 1:
            return group._mesh.close()
        with pytest.raises(cuflash.GroupError, match="rank 1 sends, which ha"):
            group.synchronize()
        group._mesh.close()

    monkeypatch.setattr(distributed.PeerGroup, "close", lambda group: None)
    on_ranks(of_rank, timeout=0.3)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_attention(on_ranks, monkeypatch, layout):
    """The same numbers as of threads, twice, with memory that is reused."""
    x = np.random.default_rng(0).standard_normal((4, 1, 40, 2, 4), np.float32)

    def of_rank(group):
        q, k, v, dout = (
            distributed.shard(x, group.rank, 5, layout=layout) for x in x
        )
        given = {"group": group, "causal": True, "layout": layout}
        for _ in range(2):
            out, lse = distributed.forward(q, k, v, return_lse=True, **given)
            found = distributed.backward(dout, q, k, v, out, lse, **given)
        return out, *found

    wanted = distributed.run_threads(5, of_rank)
    monkeypatch.setattr(
        machine.Host, "empty", lambda self, *given: peer_device.Array(*given)
    )
    monkeypatch.setattr(
        ring,
        "contiguous",
        lambda x: np.ascontiguousarray(x).view(peer_device.Array),
    )
    for got, want in zip(on_ranks(of_rank, 5), wanted, strict=True):
        for one, other in zip(got, want, strict=True):
            assert_elements(np.asarray(one), other, "one")


def test_arrays_that_differ(on_ranks):
    def of_rank(group):
        if group.rank == 1:
            group.exchange([(array(0, 0), 0)], [])
        else:
            with pytest.raises(cuflash.GroupError, match=r"\(8,\) bytes of r"):
                group.exchange([], [(array(0), 1)]).wait()

    on_ranks(of_rank)


@pytest.mark.parametrize("ranks", [{0, 1}, {1}])
@pytest.mark.parametrize("of", ["OpenMem", "GetMem", "GetEvent"])
def test_a_device_that_cannot_read_another(on_ranks, monkeypatch, of, ranks):
    """All ranks raise, also if one alone cannot share its memory."""
    name, ids, raised = f"ipc{of}Handle", {}, []
    works = getattr(peer_device.cupy().cuda.runtime, name)
    meets = distributed.PeerGroup._meet

    def refuse(given):
        if ids[threading.get_ident()] in ranks:
            raise RuntimeError("no peer access")
        return works(given)

    def meet(group):
        ids[threading.get_ident()] = group.rank
        with pytest.raises(cuflash.UnsupportedError, match="no peer access"):
            meets(group)
        raised.append(group.rank)
        raise cuflash.UnsupportedError("as it should")

    monkeypatch.setattr(distributed.PeerGroup, "_meet", meet)
    with pytest.raises(cuflash.UnsupportedError, match="as it should"):
        on_ranks(lambda group: None, **{name: refuse})
    assert sorted(raised) == [0, 1]


def test_other_arrays(on_ranks):
    def of_rank(group):
        group.exchange([(np.zeros(3), 1 - group.rank)], [])

    with pytest.raises(cuflash.DTypeError, match="expected a CuPy array"):
        on_ranks(of_rank)
