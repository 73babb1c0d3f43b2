"""scripts/mutate.py: its faults fit the kernels, and are planted and found."""

import json
import shutil

import pytest

import mutate
from helpers.host_compiler import needs_compiler
from mutation_parts import faults
from mutation_parts.faults import Fault, StaleFault

TEST = "test_far_apart_the_larger_one_stays[-1e+30-float16-emulated]"
MERGE = f"tests/test_merge.py::{TEST}"
TEXT = "a = b;\nif (a) f();\nif (a) g();\n"


def result(how="wrong result", **fault):
    said = {"stopped": "cuflash.errors.KernelFault: far out",
            "does not compile": "cuflash.errors.CompileError: no",
            "wrong result": "AssertionError: out"}  # fmt: skip
    planted = Fault("a.cu", "wrong", "a", "b", **fault)
    test = "" if how == "survived" else "tests/test_a.py::test[emulated]"
    return mutate.Result(planted, 1.0, test, said.get(how, ""))


@pytest.mark.parametrize(
    "fault", faults.read(), ids=lambda fault: str(fault).replace(" ", "-")
)
def test_every_fault_can_be_planted(fault):
    text = (mutate.KERNELS / fault.file).read_text("ascii")
    assert fault.planted(text) != text


def test_there_are_faults_in_every_kernel_of_the_emulator():
    files = {x.file for x in faults.read()}
    kernels = {x.name for x in mutate.KERNELS.iterdir()}
    assert kernels - files == {
        "ptx.cuh",  # the emulator has a twin in its place
        "types.cuh",  # declarations
        "backward_layout.cuh",
    }


def test_one_of_several_places():
    fault = Fault("a.cu", "always", "if (a) ", "", which=2, of=2)
    assert fault.planted(TEXT) == "a = b;\nif (a) f();\ng();\n"


def test_a_text_that_is_gone_or_elsewhere_too_is_an_error():
    with pytest.raises(StaleFault, match="a.cu: wrong: found 0 times"):
        Fault("a.cu", "wrong", "c = d;", "").planted(TEXT)
    with pytest.raises(StaleFault, match="found 2 times, expected 1"):
        Fault("a.cu", "wrong", "if (a)", "").planted(TEXT)


def test_what_a_text_says():
    first, second = faults.parsed(
        "a.cu",
        "# one\n- a = b;\n-   c\n+ a = c;\n"
        "~ nonfinite float16\n! not seen,\n! as it is\n\n"
        "# two\n- d\n@ 2 of 3\n",
    )
    assert first == Fault(
        "a.cu", "one", "a = b;\n  c", "a = c;",
        first="nonfinite float16", survives="not seen, as it is",
    )  # fmt: skip
    assert second == Fault("a.cu", "two", "d", "", 2, 3, second.first)


def test_a_fault_needs_a_name_and_a_text():
    with pytest.raises(ValueError, match="a.cu: a fault needs # and -"):
        faults.parsed("a.cu", "# one\n+ a\n")


def test_which_tests_a_fault_takes():
    ran = {
        "many": {"kernels": {"a.cu": 3}, "seconds": 1.0},
        "slow": {"kernels": {"a.cu": 1, "b.cuh": 1}, "seconds": 9.0},
        "other": {"kernels": {"b.cuh": 1}, "seconds": 1.0},
        "quick": {"kernels": {"a.cu": 1}, "seconds": 2.0},
        "float16 likely": {"kernels": {"a.cu": 5}, "seconds": 30.0},
    }
    fault = Fault("a.cu", "wrong", "a", "b", first="likely float16")
    want = ["float16 likely", "quick", "slow", "many"]
    assert mutate.tests_of(fault, ran) == want


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Of programs, for all of these tests."""
    return tmp_path_factory.mktemp("cache")


@needs_compiler
def test_a_fault_reaches_the_tests(tmp_path, cache):
    what = "merge.cu: lse without the logarithm"
    (fault,) = (x for x in faults.read() if str(x) == what)
    fault.plant(mutate.KERNELS, tmp_path / "kernels")
    options = "-x", "tests/test_merge.py", "-k", "emulated and far_apart"
    done = mutate.run_tests(tmp_path, cache, *options)
    assert done.returncode == mutate.FAILED, done.stdout
    failed = json.loads((tmp_path / "failed.json").read_text())
    assert failed["test"].startswith("tests/test_merge.py::test_far_apart")
    assert failed["said"].startswith("AssertionError: lse:")


@needs_compiler
def test_what_is_noted_of_the_tests_that_run(tmp_path, cache):
    what = "far_apart and 1e and float16"
    shutil.copytree(mutate.KERNELS, tmp_path / "kernels")
    options = "-n", "1", "tests/test_merge.py", "-k", f"emulated and {what}"
    done = mutate.run_tests(tmp_path, cache, *options)
    assert done.returncode == mutate.PASSED, done.stdout
    ran = json.loads((tmp_path / "ran.json").read_text())
    noted = ran[MERGE]
    assert noted["seconds"] > 0
    assert noted["kernels"]["merge.cu"] == 1
    assert noted["kernels"]["elements.cuh"] == 1


@pytest.fixture
def room(tmp_path_factory, cache):
    """Two tests of merge.cu, and a process that runs them."""
    folder = tmp_path_factory.mktemp("faults")
    ran = {
        test: {"kernels": {"merge.cu": 1}, "seconds": seconds}
        for seconds, test in enumerate([MERGE, MERGE.replace("-1e", "1e")])
    }
    room = mutate.Room(folder, cache, ran)
    yield room
    for server in room.servers:
        server.close()


@needs_compiler
def test_one_process_for_fault_after_fault(room):
    lse = Fault("merge.cu", "lse", "m + log(sum)", "m + sum")
    both = Fault("merge.cu", "both", "x + y : x", "x : x")
    found = mutate.check(lse, room)
    assert (found.how, found.test) == ("wrong result", MERGE)
    assert mutate.check(both, room).how == "survived"  # one side is nothing
    assert len(room.servers) == 1


def test_no_fault_is_begun_too_late(room):
    room.end = 0
    assert mutate.check(Fault("merge.cu", "lse", "a", "b"), room) is None


def test_results_are_kept(tmp_path):
    file = tmp_path / "results"
    mutate.Results(file).add(result())
    file.write_text(file.read_text() + '[["a.cu", "c", "d", 1, 1], 2.0, "t')
    kept = mutate.Results(file)
    assert kept.get(result().fault) == result()
    renamed = Fault("a.cu", "what it does", "a", "b", survives="as it is")
    assert kept.get(renamed).test == result().test
    assert kept.get(Fault("a.cu", "wrong", "a", "c")) is None


def test_faults_that_were_not_run_are_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(mutate, "run_sound", lambda *_: {})
    assert mutate.main(["--only", "^merge", "--minutes", "0"]) == 1
    count = len([x for x in faults.read() if x.file == "merge.cu"])
    assert f"NOT RUN: {count} of {count}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "how", ["stopped", "wrong result", "survived", "does not compile"]
)
def test_what_became_of_a_fault(how):
    assert result(how).how == how
    assert result(how).as_expected == (how in ("stopped", "wrong result"))
    explained = result(how, survives="no memory model")
    assert explained.as_expected == (how == "survived")


def test_enough_must_be_caught(capsys):
    explained = result("survived", survives="no memory model")
    assert mutate.verdict([result()] * 19 + [explained])
    assert not mutate.verdict([result()] * 18 + [explained])
    assert not mutate.verdict([result()] * 99 + [result("survived")])
    said = capsys.readouterr().out
    assert "caught 18 of 19: 94.7%" in said
    assert "not as expected: survived: a.cu: wrong" in said


def test_summary():
    table = mutate.summary([result(), result("stopped"), result("survived")])
    assert table.splitlines()[2:] == [
        "| a.cu | 3 | 1 | 1 | 1 |",
        "| all | 3 | 1 | 1 | 1 |",
    ]


def test_nothing_by_that_name(capsys):
    with pytest.raises(SystemExit):
        mutate.main(["--only", "no such file"])
    assert "no fault has that in its name" in capsys.readouterr().err
