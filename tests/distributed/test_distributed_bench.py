"""The command line of the benchmark, and what it counts."""

import itertools

import pytest

from cuflash.distributed import bench


def call(**options):
    given = bench.parse([])
    for name, value in options.items():
        setattr(given, name, value)
    made = bench.Call.__new__(bench.Call)
    made.options, made.seqlen = given, 64
    return made


@pytest.mark.parametrize(
    ("options", "sees"),
    [
        ({}, lambda i, j: j <= i),
        ({"full": True}, lambda i, j: True),
        ({"window": 5}, lambda i, j: i - 5 <= j <= i),
    ],
)
def test_operations_are_of_visible_pairs(options, sees):
    pairs = sum(sees(*x) for x in itertools.product(range(64), repeat=2))
    assert call(**options).flops() == 4 * pairs * 32 * 128


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(bench.environment, "count_devices", lambda: 0)
    assert bench.main([]) == 1
    assert "there is no GPU" in capsys.readouterr().err


def test_processes_get_a_launchers_variables(monkeypatch):
    started = []

    class Child:
        def __init__(self, command, env):
            started.append((command, env))

        def wait(self):
            return 0

    monkeypatch.setattr(bench.subprocess, "Popen", Child)
    assert bench.main(["--processes", "2", "--full"]) == 0
    assert [x[1]["RANK"] for x in started] == ["0", "1"]
    assert all(x[0][-1] == "--full" for x in started)


def test_one_gpu_and_the_slowest():
    """GPUs of 1 and 2 seconds make 1.5 calls in 2 seconds."""
    alone, together = bench.over_ranks([[[1.0, 0.7]], [[2.0, 0.9]]])
    assert alone == [pytest.approx(4 / 3)] and together == [0.9]
