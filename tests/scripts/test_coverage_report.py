"""scripts/kernel_coverage.py: counted lines, and the report."""

import os
import shutil
from collections import Counter

import numpy as np
import pytest

import kernel_coverage
from cuflash import emulator
from cuflash.plans.plan import KernelPlan
from kernel_coverage import Excepted

needs_gcov = pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("gcov"))
    and not os.environ.get("CI"),
    reason="g++ and gcov were not found",
)

TEXT = """\
// f(x) { is no function.
inline int one() { return 1; }
inline int two() { return 2; }
template <class T> inline T used(
    T x) {
    if (x > 0) {
        return x + one();
    }
    return 0;
}
inline int unused(int x) {
    for (;;) { x += used(x); }
}
"""
RUN = Counter({("a.cu", n): 1 for n in (5, 6, 7, 9)})

KERNEL = """\
struct Arguments { float* out; int count; };
extern "C" __global__ void half(const __grid_constant__ Arguments a) {
    const int i = threadIdx.x;
    if (i < a.count)
        a.out[i] = 1.0f;
    else
        a.out[i] = 2.0f;
}
"""


def test_functions():
    found = kernel_coverage.functions(TEXT)
    assert found == [(2, 2), (3, 3), (5, 10), (11, 13)]


def test_functions_without_code():
    """A one-line function may be folded into callers: `one`, not `two`."""
    called = kernel_coverage.names_called([TEXT])
    found = kernel_coverage.never_compiled(TEXT, {5, 6, 7, 9}, called)
    assert found == [3, 11]


def test_report():
    total = Counter({**RUN, ("a.cu", 7): 0})
    exceptions = (
        Excepted("a.cu", "inline int two() { return 2; }", "for the test"),
    )
    assert kernel_coverage.report(total, {"a.cu": TEXT}, exceptions) == [
        "a.cu:7: not run: return x + one();",
        "a.cu:11: not compiled: inline int unused(int x) {",
    ]


def test_an_exception_of_several_lines():
    exceptions = (
        Excepted("a.cu", "inline int two() { return 2; }", ""),
        Excepted("a.cu", "inline int unused(int x) {", "", lines=3),
    )
    total = Counter({**RUN, ("a.cu", 12): 0})
    assert not kernel_coverage.report(total, {"a.cu": TEXT}, exceptions)


@pytest.mark.parametrize("text", ["return 0;", "no such text"])
def test_an_exception_that_ran_or_is_gone_is_stale(text):
    exceptions = (Excepted("a.cu", text, "for the test"),)
    wrong = kernel_coverage.report(RUN, {"a.cu": TEXT}, exceptions)
    assert f"a.cu: stale exception: {text}" in wrong


def test_an_exception_by_the_next_line():
    """If several lines are equal."""
    one = Excepted("a.cu", "return 0;\n}\nint", "for the test")
    text = "    return 0;\n}\n    return 0;\n}\n    int two() {\n"
    assert kernel_coverage.excepted(one, text) == [3]


def test_exceptions_name_lines_of_the_kernels():
    for one in kernel_coverage.EXCEPTIONS:
        text = (kernel_coverage.KERNELS / one.file).read_text("ascii")
        assert kernel_coverage.excepted(one, text), one
        assert one.why, one


def test_help_runs_no_test(monkeypatch, capsys):
    monkeypatch.setattr(kernel_coverage, "run_tests", None)
    with pytest.raises(SystemExit) as ended:
        kernel_coverage.main(["--help"])
    assert ended.value.code == 0
    assert "[options of pytest]" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "expected"), [(4, 2), (5, 1)])
def test_tests_that_did_not_run_are_not_counted(
    monkeypatch, capsys, status, expected
):
    given = []
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(
        kernel_coverage,
        "run_tests",
        lambda cache, suite, options: given.append(options) or status,
    )
    assert kernel_coverage.main(["-k", "merge", "--no"]) == expected
    assert given == [["-k", "merge", "--no"]]
    said = capsys.readouterr()
    assert (
        said.err == f"pytest ended with status {status}: nothing was counted\n"
    )
    assert not said.out


@pytest.mark.parametrize(
    ("asked", "suite"),
    [([], "test-all"), (["--suite", "test"], "test")],
)
def test_a_suite_is_selected(monkeypatch, asked, suite):
    given = []
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(
        kernel_coverage,
        "run_tests",
        lambda cache, suite, options: given.append((suite, options)) or 5,
    )
    assert kernel_coverage.main([*asked, "-x"]) == 1
    assert given == [(suite, ["-x"])]


def test_ctrl_c_counts_nothing(monkeypatch, capsys):
    def interrupted(cache, suite, options):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(kernel_coverage, "run_tests", interrupted)
    assert kernel_coverage.main([]) == 130
    assert capsys.readouterr().err == "stopped: nothing was counted\n"


@needs_gcov
def test_counts_of_two_kernels_are_added(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setenv("CUFLASH_EMULATOR_FLAGS", "--coverage")
    file = tmp_path / "half.cu"
    file.write_text(KERNEL)
    for name, count in (("A", 32), ("B", 20)):
        kernel = KernelPlan(str(file), "half", ((name, 1),), 32, 0)
        with emulator.active() as emulated:
            emulated.launch(kernel, 1, out=np.zeros(32, "f"), count=count)
    notes = [*tmp_path.rglob("*.gcno")]
    total = kernel_coverage.counts(
        map(kernel_coverage.gcov, notes), {str(file)}
    )
    assert len(notes) == 2
    assert total[str(file), 5] == 52 and total[str(file), 7] == 12
