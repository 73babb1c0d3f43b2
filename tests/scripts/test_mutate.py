"""scripts/mutate.py: the sample, the tests run, the outcomes."""

import argparse
import json
import threading
import time

import pytest

import mutate
from helpers.host_compiler import needs_compiler
from mutation_parts import mutants, records, running
from mutation_parts.mutants import HandMade, Mutant
from mutation_parts.records import Program, Ran, Record
from mutation_parts.running import Result, TimeIsUp

MERGE = (
    "tests/kernels/test_merge.py::"
    "test_far_apart_the_larger_one_stays[-1e+30-float16-emulated]"
)


def mutant(name, line=1, file="a.cu", **rest):
    rest = {"function": (line,), **rest}
    return Mutant(f"{file}/f/{name}", file, 0, 1, "", (line,), **rest)


def result(outcome="caught", name="compare/1", **rest):
    return Result(f"a.cu/f/{name}", outcome, 1, "<  ->  <=", **rest)


# ---- What is drawn ----


def sample(names, seed):
    return [x.id for x in mutate.drawn(map(mutant, names), seed)]


def test_a_seed_draws_the_same_mutants_in_any_order():
    names = [f"{kind}/{i}" for kind in ("zero", "bound") for i in range(20)]
    assert sample(names, 1) == sample(names[::-1], 1) != sample(names, 2)


def test_operators_take_turns():
    names = [*(f"zero/{i}" for i in range(30)), "bound/0", "bound/1"]
    first = [x.split("/")[2] for x in sample(names, 0)[:4]]
    assert sorted(first[:2]) == sorted(first[2:]) == ["bound", "zero"]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ([], 3),
        (["a.cu"], 2),
        (["a.cu/f/zero/1"], 1),
        (["b.cuh", "a.cu/f/zero/1"], 2),
        (["*/zero/*"], 2),
        (["none"], 0),
    ],
)
def test_patterns_select_mutants(patterns, count):
    made = [mutant("zero/1"), mutant("bound/1"), mutant("zero/1", 1, "b.cuh")]
    found = mutants.Population({x.id: x for x in made}, {}, {}, [])
    assert len(mutate.matching(found, patterns)) == count


# ---- Which tests a mutant takes ----


def record():
    """Program p has lines 1 to 3, p2 has 1 and 2, and r is of another file."""
    file = frozenset(["a.cu"])
    programs = {
        "p": Program(file, {"a.cu": 0b1110}, 5.0),
        "p2": Program(file, {"a.cu": 0b0110}, 1.0),
        "r": Program(frozenset(["b.cuh"]), {"b.cuh": 0b10}, 1.0),
    }
    tests = {
        "all": Ran({"a.cu": 0b1110}, ("p", "r"), 1.0),
        "again": Ran({"a.cu": 0b0110}, ("p",), 2.0),
        "cheap": Ran({"a.cu": 0b0010}, ("p2",), 1.0),
        "fails": Ran({"a.cu": 0b1110}, ("p",), 0.1, passed=False),
        "other": Ran({"b.cuh": 0b10}, ("r",), 0.1),
    }
    return Record(tests, programs)


@pytest.mark.parametrize(
    ("one", "tests", "spared"),
    [
        # "again" after "all": its program is compiled then.
        (mutant("x/1", 1), ["cheap", "all", "again"], ["r"]),
        (mutant("x/1", 3), ["all"], ["p2", "r"]),
        (mutant("x/1", 9, statement=(3,)), ["all"], ["p2", "r"]),
        (mutant("x/1", 9, function=(2, 8)), ["all", "again"], ["r"]),
        # Inlined without a trace: the whole file.
        (mutant("x/1", 9), ["cheap", "all", "again"], ["r"]),
        (mutant("x/1", 9, function=()), ["cheap", "all", "again"], ["r"]),
        (mutant("x/1", 3, constant=True), ["all", "cheap", "again"], ["r"]),
        (mutant("x/1", 1, "c.cuh"), [], ["p", "p2", "r"]),
    ],
)
def test_tests_of_a_mutant(one, tests, spared):
    chosen = records.choose(one, record(), budget=60)
    assert (chosen.tests, chosen.spared) == (tests, spared)


def test_a_test_of_other_lines_comes_first():
    known = record()
    known.tests["alike"] = Ran({"a.cu": 0b0010}, ("p2",), 0.5)
    known.programs["p"] = Program(frozenset(["a.cu"]), {"a.cu": 0b1110}, 1.0)
    chosen = records.choose(mutant("x/1", 1), known, budget=60)
    assert chosen.tests == ["all", "alike", "cheap", "again"]


# ---- What comes out ----


FAULT = {"test": "tests/test_a.py::test", "said": "KernelFault: far out"}


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ({"failed": FAULT}, "caught"),
        ({"failed": {**FAULT, "said": "CompileError: no"}},
         "does not compile"),
        ({"failed": None, "same_code": True}, "equivalent"),
        ({"failed": None, "out_of_budget": True}, "out of budget"),
        ({"failed": None, "out_of_budget": False}, "missed"),
    ],
)  # fmt: skip
def test_outcome_of_a_mutant(said, outcome):
    assert running.verdict(said)[0] == outcome


def options(**values):
    return argparse.Namespace(**{"suite": "test", "only": [], **values})


def test_what_tests_cannot_detect_does_not_count(capsys):
    caught = [result(name=f"zero/{i}") for i in range(93)]
    missed = [result("missed", f"bound/{i}") for i in range(7)]
    same = [result(x, "logic/1") for x in ("equivalent", "unmodelled")]
    assert mutate.report(caught + missed + same, options()) == 0
    assert mutate.report(caught[1:] + missed + same, options()) == 1
    assert mutate.report(caught + missed, options(suite="test-all")) == 1
    said = capsys.readouterr().out
    assert "93.0% of 100 mutants" in said
    assert "1 are equivalent, 1 faults that the emulator" in said
    assert "| all | 102 | 93 | 1 | 1 | 7 | 0 |" in said


def test_the_command_that_repeats_one():
    said = mutate.described(
        result("missed", run=2, chosen=9), options(suite="test-all")
    )
    assert said.splitlines() == [
        "missed: a.cu:1: <  ->  <= (0 CPU s, 2 of 9 tests)",
        '    make mutate ARGS="--only a.cu/f/compare/1 --suite test-all"',
    ]


def test_results_are_kept_until_something_changes(tmp_path):
    path = tmp_path / "results.json"
    mutate.Results(path, "state").add(result(seconds=2.5))
    assert mutate.Results(path, "state").known == {
        result().id: result(seconds=2.5)
    }
    assert mutate.Results(path, "another").known == {}
    path.write_text('{"state": "st')
    assert mutate.Results(path, "state").known == {}


def test_records_are_kept_until_something_changes(tmp_path):
    ran = {"tests": [{"test": "t", "passed": True, "programs": ["p"],
                      "seconds": 1.0, "ran": {"merge.cu": "0x6"}}],
           "programs": {"p": {"compile": 2.0, "files": ["merge.cu"],
                              "holds": {"merge.cu": "0xe"}}}}  # fmt: skip
    asked = []

    def run(jobs):
        asked.extend(jobs)
        return [ran for _ in jobs]

    first = records.make(tmp_path / "record", ["t"], run)
    assert records.make(tmp_path / "record", ["t"], run) == first
    assert len(asked) == 1 and first.tests["t"].ran == {"merge.cu": 6}
    kept = (tmp_path / "record").read_text()
    other = kept.replace('"state": "', '"state": "other ')
    (tmp_path / "record").write_text(other)
    records.make(tmp_path / "record", ["t"], run)
    assert len(asked) == 2


# ---- Time ----


def test_a_pool_stops_at_its_deadline(monkeypatch):
    killed = threading.Event()
    pool = running.Pool("test", 2, time.monotonic() + 0.1)
    monkeypatch.setattr(pool, "kill", killed.set)
    results = pool.each(lambda do: do(), [lambda: "done", killed.wait])
    assert next(results) == "done"
    with pytest.raises(TimeIsUp):
        next(results)


def test_a_sample_keeps_what_has_ended(tmp_path, monkeypatch):
    """And what the lists say, which takes no time."""

    def each(pool, run, items):
        yield result(name=items[0].id.split("/", 2)[2])
        raise TimeIsUp

    monkeypatch.setattr(running.Pool, "each", each)
    made = {x.id: x for x in map(mutant, ("zero/1", "bound/1", "logic/1"))}
    found = mutants.Population(made, {}, {"a.cu/f/logic/1": "why"}, [])
    kept = mutate.Results(tmp_path / "results", "state")
    asked = options(count=3, jobs=1, budget=60, deadline=None)
    got, is_all = mutate.sample([*made.values()], found, kept, asked, None)
    assert not is_all and set(kept.known) == {"a.cu/f/zero/1"}
    assert [x.outcome for x in got] == ["unmodelled", "caught"]


def test_tests_can_be_selected():
    tests = ["tests/test_a.py::test_b[x]", "tests/test_c.py::test_b"]
    assert running.selected(tests, ["*test_a.py*", "none"]) == tests[:1]


def test_a_list_runs_nothing(capsys):
    assert mutate.main(["--list", "--only", "merge.cu", "--count", "2"]) == 0
    assert capsys.readouterr().out.count("merge.cu/merge/") == 2


def test_nothing_by_that_name(capsys):
    assert mutate.main(["--only", "no such file"]) == 2
    assert "no mutant is called no such file" in capsys.readouterr().out


# ---- From end to end ----


def of_merge(name, old, new):
    made = HandMade("merge.cu", name, old, new)
    text = (records.KERNELS / "merge.cu").read_text("ascii")
    return made.mutant(mutants.Source("merge.cu", text))


@needs_compiler
@pytest.mark.skipif(not running.GCOV, reason="gcov was not found")
def test_a_record_of_one_test(tmp_path):
    with running.recording_pool("test", 1, tmp_path) as pool:
        assert MERGE in pool.tests()
        said = pool.do({"tests": [MERGE], "record": True})
    (ran,), (program,) = said["tests"], said["programs"].values()
    assert ran["passed"] and program["files"] == [
        "common/constants.cuh", "common/elements.cuh",
        "common/merged_row.cuh", "common/softmax.cuh", "common/types.cuh",
        "merge.cu",
    ]  # fmt: skip
    lines = (records.KERNELS / "merge.cu").read_text("ascii").splitlines()
    returns = next(i for i, x in enumerate(lines, 1) if "return;" in x)
    held = int(program["holds"]["merge.cu"], 16)
    assert held >> returns & 1
    assert not json.dumps(said).count("cuda_host.h")


@needs_compiler
def test_one_worker_runs_mutant_after_mutant():
    """One side of a merge has no keys here."""
    lines = {"merge.cu": (1 << 60) - 1}
    program = Program(frozenset(lines), lines, 1.0)
    known = Record({MERGE: Ran(lines, ("p",), 1.0)}, {"p": program})
    with running.pool("test", 1) as pool:
        outcomes = [
            running.check(of_merge(*x), pool, known, 60).outcome
            for x in (
                ("lse", "m + log(sum)", "m + sum"),
                ("wide steps", "start += 32", "start += 64"),
                ("same code", "lane == 0)", "(lane) == 0)"),
                ("nonsense", "m + log(sum)", "m + nonsense"),
            )
        ]
    assert outcomes == ["caught", "missed", "equivalent", "does not compile"]
