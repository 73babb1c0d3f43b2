"""Environment variables: unknown values, and what CUFLASH_LOG logs."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import cuflash
from cuflash import settings
from cuflash.errors import ValueRangeError
from cuflash.launch import attention as execute
from cuflash.plans.plan import FamilyName
from cuflash.request.validate import attention as validate
from helpers.counting import Counting

ROOT = Path(__file__).parents[2]
Q = np.ones((3, 4), np.float32)
HALVES = np.ones((2, 40, 4, 32), np.float16)


@pytest.fixture
def first_call(monkeypatch):
    """Make the next call the first one of the process."""
    settings.check.cache_clear()
    yield
    settings.check.cache_clear()


@pytest.mark.parametrize("name", settings.VALUES)
def test_the_first_call_names_an_unknown_value(first_call, monkeypatch, name):
    monkeypatch.setenv(name, "perhaps")
    for _ in range(2):
        with pytest.raises(ValueRangeError) as caught:
            cuflash.forward(Q, Q, Q)
    assert str(caught.value) == (
        f"the environment variable {name} is 'perhaps', expected"
        f" {settings.expected(name)}"
    )


@pytest.mark.parametrize("name", settings.VALUES)
def test_known_values_and_none_pass(first_call, monkeypatch, name):
    for value in (*settings.VALUES[name], ""):
        monkeypatch.setenv(name, value)
        settings.check.cache_clear()
        cuflash.forward(Q, Q, Q)
        assert settings.read(name) == (value or None)


def test_the_values_in_words():
    assert settings.expected("CUFLASH_CHECK") == "'0', '1' or unset"


def test_every_family_can_be_set():
    assert settings.VALUES["CUFLASH_FAMILY"] == get_args(FamilyName)


def test_the_guide_lists_them():
    page = ROOT / "docs/guide/performance.md"
    text = page.read_text(encoding="utf-8")
    for name, values in settings.VALUES.items():
        rows = text.partition(f"| `{name}` |")[2].partition("| `CU")[0]
        assert all(f"`{value}`" in rows for value in values), name


def python(text, **variables):
    """Run Python text with environment variables; return the result."""
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_no_value_stops_an_import():
    wrong = dict.fromkeys(settings.VALUES, "perhaps")
    done = python("import cuflash", **wrong)
    assert (done.returncode, done.stderr) == (0, "")


# CUFLASH_LOG -----------------------------------------------------------------

CALL = f"""
import sys
sys.path.append({str(ROOT / "tests")!r})
import numpy as np
from cuflash.launch import attention as execute
from cuflash.request.validate import attention as validate
from helpers.counting import Counting
q = np.ones((3, 4), np.float32)
for machine in [Counting("sm_80")] * 2 + [Counting("sm_90a")]:
    execute.forward(validate.forward(q, q, q), machine)
"""


def plans(caplog, machine, q=HALVES, **options):
    """Make a call; return the plans that it logged."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "cuflash"):
        execute.forward(
            validate.forward(q, HALVES, HALVES, **options), machine
        )
    return [x.getMessage() for x in caplog.records if x.name == "cuflash"]


def test_each_machine_logs_a_plan_when_it_uses_it_first(caplog):
    for machine in (Counting("sm_80"), Counting("sm_80")):
        (line,) = plans(caplog, machine)
        assert line.startswith("forward batch 2 seqlen 40 x 40 ")
        assert "forward_sm80 (" in line and "bytes)" in line
        assert not plans(caplog, machine)


def test_another_layout_has_no_new_plan(caplog):
    machine = Counting("sm_80")
    assert plans(caplog, machine)
    assert not plans(caplog, machine, HALVES[::-1])
    assert len(plans(caplog, machine, causal=True)) == 1


def test_plans_are_logged_to_stderr():
    done = python(CALL, CUFLASH_LOG="plan")
    assert not done.returncode, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("cuflash: forward batch 1 ") for line in lines)
    assert python(CALL, CUFLASH_LOG="").stderr == ""


def test_plans_go_to_the_programs_log():
    text = "import logging\nlogging.basicConfig(format='mine %(message)s')\n"
    done = python(text + CALL, CUFLASH_LOG="plan")
    assert not done.returncode, done.stderr
    assert done.stderr.count("mine forward batch 1 ") == 2
    assert "cuflash: " not in done.stderr
