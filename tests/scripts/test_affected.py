"""scripts/affected.py: the tests that run a kernel file."""

import json

import affected
from mutation_parts.records import Program, Ran, Record

FILE = "sm90/forward.cu"


def ran(lines, seconds, *programs):
    bits = sum(1 << line for line in lines)
    return Ran({FILE: bits} if lines else {}, programs, seconds)


def record(**tests):
    program = Program(frozenset([FILE]), {}, 5.0)
    return Record(tests, {"p": program, "r": program})


def test_the_most_new_lines_for_their_time_come_first():
    known = record(
        slow=ran([1, 2, 3], 9, "p"),
        fast=ran([1, 2], 1, "p"),
        other=ran([], 1, "p"),
    )
    assert affected.ordered(known, FILE, 60) == ["fast", "slow"]


def test_a_program_is_compiled_once():
    """After a and its program, c takes 1 s, b 6 s."""
    known = record(
        a=ran([1, 2], 1, "p"), b=ran([1], 1, "r"), c=ran([1], 1, "p")
    )
    assert affected.ordered(known, FILE, 60) == ["a", "c", "b"]


def test_time_ends_the_tests_that_run_no_other_line():
    known = record(a=ran([1], 1, "p"), b=ran([2], 90, "p"), c=ran([1], 9, "p"))
    assert affected.ordered(known, FILE, 10) == ["a", "b"]


def line(name, file):
    return json.dumps({
        "test": name, "passed": True, "programs": {}, "seconds": 1.0,
        "ran": {file: "2"}, "state": "old", "files": [file],
    })  # fmt: skip


def test_an_old_record_will_do(tmp_path, capsys):
    names = line("t[1]", FILE), line("t[2]", "fma/forward.cu")
    (tmp_path / "record_test.jsonl").write_text("\n".join([*names, "{cut"]))
    folder = ["--folder", str(tmp_path)]
    assert affected.main([FILE, "--list", *folder]) == 0
    assert capsys.readouterr().out.split("\n")[1:] == ["t[1]", ""]
    assert affected.main(["merge.cu", *folder]) == 1
    assert affected.main(["no.cu", *folder]) == 2
