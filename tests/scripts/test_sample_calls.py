"""scripts/sample_calls.py without a GPU."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sample_calls

SCRIPT = Path(sample_calls.__file__)


def test_help_needs_no_cupy():
    text = f"""
import runpy, sys
sys.modules["cupy"] = None
sys.path.insert(0, {str(SCRIPT.parent)!r})
sys.argv = ["sample_calls.py", "--help"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--dtype" in done.stdout


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sample_calls.machine, "find_gpu", lambda: "no driver")
    assert sample_calls.main([]) == 1
    assert "found none (no driver). Nothing was run" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["0 0", "3 3", "-1 2"])
def test_no_such_part(part, capsys):
    with pytest.raises(SystemExit) as ended:
        sample_calls.main(["--part", *part.split()])
    assert ended.value.code == 2
    assert f"--part {part}: requires 0 <= I < N" in capsys.readouterr().err


def test_ctrl_c_ends_in_a_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(sample_calls.machine, "find_gpu", lambda: None)
    monkeypatch.setattr(sample_calls, "sample", lambda *_: [interrupted])
    assert sample_calls.main([]) == 130
    assert capsys.readouterr().err == "stopped: not all calls were run\n"


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float64", "tf32x3"])
def test_calls_are_valid(monkeypatch, name):
    """NumPy arrays in place of CuPy's are checked, values included."""
    monkeypatch.setattr(sample_calls, "cupy", np)
    calls = [*sample_calls.sample([name], ["decode", "kvcache"])]
    assert bool(calls) == (name != "tf32x3")
    calls += sample_calls.sample([name], ["shared"])
    for call in calls:
        with np.errstate(all="ignore"):
            call()


@pytest.mark.parametrize("name", ["bfloat16", "float64", "tf32x3"])
def test_calls_of_derivatives_are_valid(monkeypatch, name):
    monkeypatch.setattr(sample_calls, "cupy", np)
    calls = [*sample_calls.sample([name], ["derivatives"])]
    assert len(calls) == 5
    with np.errstate(all="ignore"):
        calls[0]()
