"""scripts/bench_numpy.py: its table."""

import pytest

import bench_numpy


@pytest.mark.parametrize("more", [[], ["--causal"]])
def test_the_table(capsys, more):
    shape = "--shape 2 20 3 8 --rounds 1"
    assert bench_numpy.main([*shape.split(), *more]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("NumPy ")
    names = [row.split()[5] for row in rows]
    assert names == ["forward", "backward"]
    # Of float32, 20 keys: unit 2^-24, times 100 for dq's sums and products
    assert all(float(row.split()[-1]) < 100 * 2.0**-24 for row in rows)


def test_the_table_of_nan(capsys):
    shape = "--shape 1 20 2 8 --rounds 1"
    assert bench_numpy.main([*shape.split(), "--nan"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("keys of inf                 double_backward ")
