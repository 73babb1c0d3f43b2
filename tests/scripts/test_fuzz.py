"""scripts/fuzz.py: what it draws, finds, counts and writes."""

import json

import pytest

import fuzz
from cuflash.plans.plan import device_of_arch, plan
from cuflash.request import options
from fuzz_parts import pages, problems, programs, tally, units, workers
from helpers import calls, tried
from helpers.data import LAYOUTS, Case
from helpers.host_compiler import needs_compiler
from helpers.kernels import small_problem
from strategies import VALUES

SEEDS = range(400)
ON = pytest.mark.parametrize("on", ["emulator", "gpu"])


def drawn(on, each=3):
    for program in (programs.draw(seed, on == "gpu") for seed in SEEDS):
        for index in range(each):
            yield program, problems.draw(program, index, on)


# Draws ----------------------------------------------------------------------


@ON
def test_a_seed_is_a_program_and_a_number_a_problem(on):
    first = [(repr(p), repr(x)) for p, x in drawn(on, 2)]
    assert [(repr(p), repr(x)) for p, x in drawn(on, 2)] == first
    assert len({x for _, x in first}) > 0.99 * len(first)


@ON
def test_everything_is_drawn(on):
    known = [*drawn(on)]
    labels = [problems.labels(*x) for x in known]
    seen = {name: {x[name] for x in labels} for name in ("direction", "dtype")}
    assert seen["direction"] == set(programs.DIRECTIONS)
    assert seen["dtype"] == set(programs.DTYPES)
    assert {x["layout"] for x in labels} == set(LAYOUTS)
    assert {x["values"] for x in labels} == set(VALUES)
    lengths = {x.seqlen_q for _, x in known}
    assert {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129} <= lengths
    # Users' functions are drawn in tests/kernels/test_expressions_drawn.py.
    there = {x.part_of for x in options.TABLE if x.part_of and not x.traced}
    asked = {x for label in labels for x in label["options"]}
    # Packed sequences are a direction here.
    names = {"segment_ids": "segment_ids_q"}
    assert {names.get(x, x) for x in there} - {"cu_seqlens"} <= asked


def test_options_come_alone_and_with_each_other():
    sets = {x.options for x in map(programs.draw, SEEDS)}
    assert {len(x) for x in sets} >= {0, 1, 2, 3, 4, 5, 6}


# Findings -------------------------------------------------------------------


@pytest.fixture
def plain(monkeypatch):
    """Return a seed whose program has no options, and few problems."""
    monkeypatch.setitem(units.PROBLEMS, "emulator", 8)
    program = programs.Program(7, "forward", Case("float32"))
    monkeypatch.setattr(programs, "draw", lambda *_: program)
    return program.seed


@needs_compiler
def test_right_results_are_counted(plain):
    backend = workers.make("emulator")
    done = [*units.run("emulator", backend, plain)]
    assert [x.name for x in done] == [f"{plain}/{i}" for i in range(8)]
    assert not any(x.wrong for x in done)
    families = {x.labels["family"] for x in done}
    assert "fma" in families and families <= {"fma", "none"}


@needs_compiler
def test_one_wrong_element_is_found_and_repeated(plain, monkeypatch, capsys):
    def wrong(*args):
        out, lse = forward(*args)
        lse[(-1,) * 3] += 0.001
        return out, lse

    forward = calls.forward
    monkeypatch.setattr(calls, "forward", wrong)
    backend = workers.make("emulator")
    (done, *_) = units.run("emulator", backend, plain)
    counted = tally.Tally("emulator", "0123abc", "2026-11-26")
    fuzz.note("emulator", done, counted)
    said = capsys.readouterr().out
    assert "WRONG: " in said and "lse[" in said and "(Case(" in said
    command = said.rpartition("again: python scripts/fuzz.py ")[2].split()
    assert fuzz.main(command) == 1
    monkeypatch.setattr(calls, "forward", forward)
    assert fuzz.main(command) == 0


def test_a_unit_ends_after_a_few_findings(plain, monkeypatch):
    def raises(*args):
        raise ValueError("a fault\n  of two lines")

    monkeypatch.setattr(calls, "forward", raises)
    backend = workers.make("emulator")
    done = [*units.run("emulator", backend, plain)]
    assert len(done) == units.MOST_WRONG
    assert "ValueError: a fault of two lines (Case(" in done[0].wrong


def test_a_process_that_dies_is_a_finding(monkeypatch):
    monkeypatch.setattr(workers, "OFTEN", 0.05)
    with workers.running("no such backend", 0, 1) as results:
        done = next(x for x in results if x is not None)
    assert done.wrong == "its process died of status 1"


# The count ------------------------------------------------------------------


def tallied(backend="emulator", commit="0123abc", number=3):
    counted = tally.Tally(backend, commit, "2026-11-26")
    for i in range(number):
        counted.add({
            "family": "sm80", "direction": "forward", "dtype": "float16",
            "options": ["causal"] * (i > 0), "values": "peaked",
            "layout": "packed", "precision": None,
        })  # fmt: skip
    return counted


def test_counts_add_up(tmp_path):
    path = tmp_path / "new" / "fuzz.json"
    for number in (3, 4):
        tally.add_to(path, tallied(number=number).record())
    (run,) = tally.read(path)["runs"]
    assert run["problems"] == 7
    assert run["kinds"] == {"sm80 forward float16": 7}
    assert run["options"] == {"causal": 5, "none": 2}
    tally.add_to(path, tallied(commit="fedcba").record())
    assert [x["problems"] for x in tally.read(path)["runs"]] == [7, 3]


def test_what_mended_a_finding_stays(tmp_path):
    path, counted = tmp_path / "fuzz.json", tallied()
    counted.found("12/3", "out[0]: wrong")
    tally.add_to(path, counted.record())
    found = tally.read(path)
    found["findings"][0]["mended"] = "fedcba9"
    path.write_text(json.dumps(found))
    tally.add_to(path, counted.record())
    (finding,) = tally.read(path)["findings"]
    assert finding["mended"] == "fedcba9" and finding["seed"] == "12/3"


def test_a_file_of_another_machine_is_merged(tmp_path, monkeypatch):
    page, there = tmp_path / "fuzz.md", tmp_path / "there.json"
    page.write_text("<!-- fuzz: backends -->\n\nAfter.\n")
    monkeypatch.setattr(tally, "FILE", tmp_path / "fuzz.json")
    monkeypatch.setattr(pages, "PAGE", page)
    tally.add_to(there, tallied("gpu", number=1200).record())
    assert fuzz.main(["--merge", str(there)]) == 0
    assert "| gpu | 1,200 | 1 | 2026-11-26 |" in page.read_text()
    assert page.read_text().endswith("|\n\nAfter.\n")


def test_the_page_and_the_file_agree():
    """`python scripts/fuzz.py --write-docs` makes the tables anew."""
    text = pages.PAGE.read_text()
    assert pages.updated(text, tally.read(tally.FILE)) == text


def test_tables_tell_findings_that_nothing_mended():
    counted = tallied()
    counted.found("12/3", "out[0, 1]: got 1 | 2 (Case())")
    counted.found("12/4", "again")
    record = counted.record()
    record["findings"][1]["mended"] = "fedcba9"
    assert "| 2 | 1 |" in pages.TABLES["backends"](record)[-1]
    rows = pages.TABLES["findings"](record)[-2:]
    assert r"out\[0, 1\]: got 1 \| 2 | **nothing yet** |" in rows[0]
    assert "| fedcba9 |" in rows[1]
    families = pages.TABLES["families"](record)
    assert families[-1] == "| sm80, forward | 3 |"


# The command line -----------------------------------------------------------


class Finished:
    """Stands for the processes."""

    def __init__(self, done):
        self.done = done

    def __enter__(self):
        return iter(self.done)

    def __exit__(self, *args):
        pass


def run(monkeypatch, tmp_path, done, *more):
    monkeypatch.setattr(workers, "running", lambda *_: Finished(done))
    path = tmp_path / "out.json"
    given = ["--output", str(path), "--commit", "fedcba", *more]
    return fuzz.main(given), tally.read(path)


LABELS = {
    "family": "sm80", "direction": "forward", "dtype": "float16",
    "options": [], "values": "normal", "layout": "contiguous",
    "precision": None,
}  # fmt: skip


def test_so_many_problems(monkeypatch, tmp_path):
    done = [units.Done(f"1/{i}", dict(LABELS)) for i in range(9)]
    status, record = run(monkeypatch, tmp_path, done, "--count", "4")
    assert status == 0
    (found,) = record["runs"]
    assert (found["problems"], found["commit"]) == (4, "fedcba")


def test_a_finding_is_the_exit_status(monkeypatch, tmp_path):
    done = [units.Done("1/0", dict(LABELS), "out[0]: wrong")]
    done += [units.Done("1/1", dict(LABELS))]
    status, record = run(monkeypatch, tmp_path, done, "--count", "2")
    assert status == 1
    assert record["runs"][0]["problems"] == 2
    assert record["findings"][0]["what"] == "out[0]: wrong"


def test_ctrl_c_keeps_the_count(monkeypatch, tmp_path, capsys):
    def interrupted():
        yield units.Done("1/0", dict(LABELS))
        raise KeyboardInterrupt

    status, record = run(monkeypatch, tmp_path, interrupted())
    assert status == 130 and record["runs"][0]["problems"] == 1
    assert capsys.readouterr().err.startswith("stopped: ")


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(fuzz.machine, "find_gpu", lambda: "no driver")
    assert fuzz.main(["--on", "gpu"]) == 1
    assert "found none (no driver). Nothing was run" in capsys.readouterr().err


def test_a_name_that_is_none(capsys):
    with pytest.raises(SystemExit):
        fuzz.main(["--again", "12-3"])
    assert "expected SEED/NUMBER" in capsys.readouterr().err


# What the tests draw --------------------------------------------------------


def test_drawn_tests_count_what_they_planned(monkeypatch, tmp_path):
    monkeypatch.setattr(tried, "FOLDER", tmp_path)
    monkeypatch.setattr(tried, "PLANNED", [])
    monkeypatch.setattr(tried, "COUNTED", tally.Tally("tests", "fed", "today"))
    case = Case("float32", causal=True, arrays_of=("bias",), seqlen_q=3)
    problem = small_problem("backward", "float32")
    tried.noting(plan)(problem, device_of_arch("sm_80"))
    tried.note(case)
    tried.write()
    (path,) = tmp_path.iterdir()
    (run,) = tally.read(path)["runs"]
    assert run["kinds"] == {"fma backward float32": 1}
    assert run["options"] == {"bias": 1, "causal": 1}
