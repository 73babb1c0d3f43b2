"""scripts/bench_jax.py: its table, and what it says without a GPU."""

import pytest

jax = pytest.importorskip("jax", reason="bench_jax.py needs JAX")

import bench_jax  # noqa: E402
from cuflash.jax import cuda  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def callbacks_as_before(monkeypatch):
    """The script counts them."""
    monkeypatch.setattr(cuda.Program, "__call__", cuda.Program.__call__)


def test_the_table(capsys):
    small = "--seqlen 8 --heads 2 --kv-heads 1 --head-dim 8 --calls 1"
    assert bench_jax.main(["--platform", "cpu", *small.split()]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert "(2, 8, 2/1, 8) bfloat16" in title
    assert head.split()[:2] == ["implementation", "call"]
    named = [row[:16].strip() for row in rows]
    assert named == ["cuflash.jax"] * 2 + ["jax.nn, xla"] * 2


def test_without_a_gpu(capsys, monkeypatch):
    def devices(platform):
        raise RuntimeError

    monkeypatch.setattr(jax, "devices", devices)
    assert bench_jax.main([]) == 0
    assert "finds no device of cuda" in capsys.readouterr().out
