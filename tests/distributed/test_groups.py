"""Ranks that make different calls, fail or do not answer."""

import time

import numpy as np
import pytest

import cuflash
from cuflash import distributed
from helpers.compare import assert_allclose, assert_elements

Q = np.random.default_rng(0).standard_normal((1, 8, 2, 4), np.float32)


def forward(group, q=Q, k=Q, v=Q, **options):
    return distributed.forward(q, k, v, group=group, **options)


def run(function, size=2, timeout=20.0):
    """Run ranks; return the error of each, None without one."""

    def of_rank(group):
        try:
            function(group)
        except cuflash.CuflashError as error:
            return error
        return None

    return distributed.run_threads(size, of_rank, timeout=timeout)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": True}, "rank 0: forward.*causal True.*rank 1: forward"),
        ({"scale": 2.0}, "scale 2.0"),
        ({"q": Q[:, :4], "k": Q[:, :4], "v": Q[:, :4]}, "seqlen_q 4"),
        ({"q": Q.astype(np.float64)}, "DTypeError: k has dtype float32"),
        ({"layout": "contiguous"}, "layout contiguous"),
        ({"window": (3, None)}, r"window \(3, None\)"),
        ({"layout": "striped"}, "rank 0: ValueRangeError: layout is 'stri"),
    ],
)
def test_ranks_that_differ_all_raise(options, words):
    errors = run(
        lambda group: forward(group, **(options if group.rank == 0 else {}))
    )
    assert all(isinstance(x, cuflash.CuflashError) for x in errors)
    assert_says(errors[1], words)


def assert_says(error, words):
    with pytest.raises(type(error), match=words):
        raise error


def test_ranks_that_agree_are_named_together():
    errors = run(lambda group: forward(group, causal=group.rank == 2), 4)
    assert_says(errors[0], "ranks 0, 1, 3: forward.*rank 2: forward")


def test_other_calls_of_a_group_still_work():
    def two_calls(group):
        with pytest.raises(cuflash.ValueRangeError):
            forward(group, causal=group.rank == 0)
        return forward(group)

    first, second = distributed.run_threads(2, two_calls)
    assert first.shape == second.shape == Q.shape


def test_a_rank_that_dies():
    def of_rank(group):
        if group.rank == 1:
            raise RuntimeError("out of memory")
        forward(group)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="out of memory"):
        distributed.run_threads(3, of_rank, timeout=60.0)
    assert time.monotonic() - start < 30  # nobody waited for the timeout


def test_the_others_say_who_died():
    caught = []

    def of_rank(group):
        if group.rank == 1:
            raise RuntimeError("out of memory")
        try:
            forward(group)
        except cuflash.GroupError as error:
            caught.append(error)

    with pytest.raises(RuntimeError):
        distributed.run_threads(2, of_rank)
    assert_says(caught[0], "rank 1 failed: RuntimeError: out of memory")


def test_a_rank_that_makes_no_call():
    errors = run(lambda group: group.rank or forward(group), timeout=0.2)
    assert_says(errors[0], r"rank 0 waited 0.2 s for the calls of all ranks")


def test_a_rank_that_sends_nothing():
    def of_rank(group):
        if group.rank == 0:
            group.exchange([], [(np.empty(3), 1)]).wait()

    (error, _) = run(of_rank, timeout=0.2)
    assert_says(error, "rank 0 waited 0.2 s for an array of rank 1")


def test_an_array_of_another_size():
    def of_rank(group):
        messages = [(np.zeros(3 + group.rank), 1 - group.rank)]
        received = [(np.empty(3 + group.rank), 1 - group.rank)]
        group.exchange(messages, received).wait()

    with pytest.raises(cuflash.GroupError, match="received an array"):
        distributed.run_threads(2, of_rank)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group": 3}, "group is 3 of type int, expected a Group"),
        ({"ulysses": 3}, "ulysses is 3, expected 1 to 2"),
        ({"k": Q[:, :, :1], "v": Q[:, :, :1], "ulysses": 2}, "num_heads_kv 1"),
        ({"q": Q[:, :7]}, "the whole q has 14 tokens, expected a multiple"),
        ({"cu_seqlens_q": [0, 16]}, "q has 4 axes, expected 3"),
    ],
)
def test_bad_arguments(options, words):
    (error, _) = run(lambda group: forward(**{"group": group, **options}))
    assert_says(error, words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cu_seqlens_q": [0, 16]}, "cu_seqlens_k is missing"),
        ({"cu_seqlens_q": [0, 12]}, "cu_seqlens_q ends at 12, expected 16"),
        ({"cu_seqlens_q": [0, 6, 16]}, "sequence 0 of cu_seqlens_q has 6"),
        (
            {"cu_seqlens_q": [0, 16], "cu_seqlens_k": [0, 8, 16]},
            "cu_seqlens_k has 3 offsets, expected 2",
        ),
    ],
)
def test_bad_offsets(given, words):
    row = Q[0]
    (error, _) = run(lambda group: forward(group, row, row, row, **given))
    assert_says(error, words)


def test_devices_of_other_ranks():
    with pytest.raises(cuflash.ValueRangeError, match="devices has 3 elem"):
        distributed.run_threads(2, lambda group: None, devices=[0, 1, 2])


@pytest.mark.parametrize("axes", [2, 3])
def test_axes_that_q_lacks(axes):
    """They are left out of the results, too."""
    q = Q[0, :, 0] if axes == 2 else Q[0]

    def of_rank(group):
        part = distributed.shard(q, group.rank, 2)
        given = {"group": group, "causal": True}
        out, lse = distributed.forward(
            part, part, part, return_lse=True, **given
        )
        return (
            out,
            lse,
            *distributed.backward(out, part, part, part, out, lse, **given),
        )

    each = distributed.run_threads(2, of_rank)
    out, lse = cuflash.forward(q, q, q, causal=True, return_lse=True)
    joined = distributed.unshard([x[0] for x in each])
    # Merging adds a few roundings of float32 to weights that sum to 1.
    assert_allclose(joined, out, "joined", atol=16 * 2.0**-24 * 4)
    assert each[0][1].ndim == lse.ndim
    assert [x.ndim for x in each[0][2:]] == [axes] * 3


def test_gather_gives_the_whole_to_all():
    def of_rank(group):
        part = distributed.shard(Q, group.rank, 2)
        return distributed.gather(part, group=group)

    for whole in distributed.run_threads(2, of_rank):
        assert_elements(whole, Q, "whole")
