"""Time cuflash and its installed peers on this machine's GPU.

    python scripts/bench.py                      # the grid, both directions
    python scripts/bench.py --head-dim 128 --causal yes --peer fa2
    python scripts/bench.py --head-dim 128 --width 4096 --kv-heads 8 --peer mha
    python scripts/bench.py --dtype float16 --peer bfloat16
    python scripts/bench.py --dtype float64
    python scripts/bench.py --precision tf32x3 --peer efficient
    python scripts/bench.py --output h200.json --pictures docs/benchmarks
    python scripts/bench.py --read h200.json     # an earlier record
    python scripts/bench.py --write-docs         # tables, from the JSON files
    python scripts/bench.py --options            # masks, score modifications
    python scripts/bench.py --options window softcap --direction forward
    python scripts/bench.py --decode             # one query over many keys
    python scripts/bench.py --memory             # peak extra memory
    python scripts/bench.py --import-time        # import and first call

Every cell is checked against float64 before it is timed.
docs/benchmarks/README.md describes how the times are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import command_line
from bench_parts import (
    cells,
    decode,
    imports,
    machine,
    markdown,
    option_cells,
    peers,
    report,
)
from bench_parts.options import WithDefaults, in_words
from bench_parts.report import heading, line, save, say, show, show_summary
from bench_parts.report import summary as summary_of
from command_line import number
from cuflash.request.validate.shapes import MAX_HEAD_DIM_V

MIB = 1 << 20
MASKS = {"yes": [True], "no": [False], "both": [False, True]}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=WithDefaults,
    )
    add = parser.add_argument
    add("--direction", nargs="+", choices=cells.DIRECTIONS,
        default=list(cells.DIRECTIONS))  # fmt: skip
    add("--head-dim", nargs="+", type=number, default=None,
        help=defaults("head_dims"))  # fmt: skip
    add("--seqlen", nargs="+", type=number, default=None,
        help=defaults("seqlens"))  # fmt: skip
    add("--causal", choices=("yes", "no", "both"), default=None,
        help="default both; no with --options")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float16", "float32", "float64"),
        default=None, help="default bfloat16; float32 with "
        "--precision")  # fmt: skip
    add("--precision", choices=("tf32x3",), default=None,
        help="precision of cuflash's calls")  # fmt: skip
    add("--tokens", type=number, default=cells.TOKENS,
        help="batch * seqlen")  # fmt: skip
    add("--width", type=number, default=None,
        help=f"heads * head_dim; {defaults('width')}")  # fmt: skip
    add("--heads", type=number, default=None,
        help="query heads, instead of --width")  # fmt: skip
    add("--kv-heads", type=number, default=None,
        help="key heads; default: as many as query heads")  # fmt: skip
    add("--peer", nargs="*", choices=peers.NAMES, default=None,
        help="default: all that are installed; --peer alone: none. mha and "
        "bfloat16 are cuflash itself, with as many key heads as query heads, "
        "and in bfloat16")  # fmt: skip
    add("--seconds", type=float, default=0.08,
        help="seconds to time each cell and runner")  # fmt: skip
    add("--family", default="", help="a label for the JSON file")
    add("--output", type=Path, default=None, help="JSON file to write")
    add("--pictures", type=Path, default=None, help="folder for PNG plots")
    add("--read", type=Path, default=None,
        help="show and plot such a JSON file without measuring")  # fmt: skip
    add("--write-docs", action="store_true", help="regenerate the tables of "
        "README and docs from the JSON files that they name")  # fmt: skip
    add("--options", nargs="*", choices=option_cells.OPTIONS, default=None,
        metavar="OPTION", help="time calls with these options, and without: "
        f"{', '.join(option_cells.OPTIONS)}; none given: all. "
        f"Default --head-dim {in_words(option_cells.HEAD_DIMS)}, "
        f"--seqlen {in_words(option_cells.SEQLENS)}")  # fmt: skip
    add("--decode", action="store_true", help="time calls of one query per "
        "sequence, in CUDA graphs; shapes are fixed")  # fmt: skip
    add("--memory", action="store_true", help="peak extra memory instead")
    add("--import-time", action="store_true", help="import times instead")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or (
        "float32" if options.precision else "bfloat16"
    )
    if options.precision and options.dtype != "float32":
        parser.error(f"--precision {options.precision}: for float32 only")
    if options.decode:
        reason = decode.why_no_decode(options)
        if reason:
            parser.error(f"--decode: {reason}")
    if options.options is not None:
        options.options = options.options or list(option_cells.OPTIONS)
        reason = why_no_options(options)
        if reason:
            parser.error(f"--options: {reason}")
        with_defaults_of_options(options)
    options.causal = options.causal or "both"
    known = cells.grid_of(options.dtype)
    options.head_dim = options.head_dim or list(known.head_dims)
    options.seqlen = options.seqlen or list(known.seqlens)
    options.width = options.width or known.width
    for d in options.head_dim:
        if d > min(MAX_HEAD_DIM_V, options.width):
            parser.error(
                f"--head-dim {d}: at most {MAX_HEAD_DIM_V}, and at most "
                "--width"
            )
    if max(options.seqlen) > options.tokens:
        parser.error(f"--seqlen {max(options.seqlen)}: at most --tokens")
    kv_heads = options.kv_heads or 1
    for d in options.head_dim:
        heads = options.heads or options.width // d
        if heads % kv_heads:
            parser.error(
                f"--kv-heads {kv_heads}: does not divide {heads}, "
                f"the query heads of head_dim {d}"
            )
    if options.memory and {*(options.peer or ())} - {"fa2", "cudnn"}:
        parser.error("--memory supports only the peers fa2 and cudnn")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds}: must be above 0")
    if not (options.read or options.write_docs) and options.output:
        command_line.check_file(parser, "--output", options.output)
    if options.pictures:
        command_line.check_folder(parser, "--pictures", options.pictures)
    return options


def why_no_options(options: argparse.Namespace) -> str | None:
    """Return an argument that conflicts with --options, None if none does."""
    names = ", ".join(options.options)
    kinds = [option_cells.OPTIONS[name] for name in options.options]
    lengths = options.seqlen and all(x.own_seqlen for x in kinds)
    totals = all(x.own_tokens for x in kinds)
    masks = options.causal and all(x.causal is not None for x in kinds)
    reasons = {
        "no --peer, each call is compared with the same call without":
            options.peer is not None,
        "no --memory and no --import-time, only calls are timed":
            options.memory or options.import_time,
        "no --pictures, only tables are made": options.pictures,
        "no --precision, only dtypes can be selected": options.precision,
        "no float64, there is no error bound with options":
            options.dtype == "float64",
        f"no --seqlen, {names}: lengths are fixed": lengths,
        f"no --tokens, {names}: lengths are fixed":
            totals and options.tokens != cells.TOKENS,
        f"no --causal, {names}: masks are fixed": masks,
    }  # fmt: skip
    return next((word for word, true in reasons.items() if true), None)


def with_defaults_of_options(options: argparse.Namespace) -> None:
    """Fill in the defaults of --options."""
    options.head_dim = options.head_dim or list(option_cells.HEAD_DIMS)
    options.causal = options.causal or "no"
    if all(option_cells.OPTIONS[x].own_seqlen for x in options.options):
        options.seqlen = [1]  # unused
    options.seqlen = options.seqlen or list(option_cells.SEQLENS)


def defaults(name: str) -> str:
    """Describe an option's default."""
    narrow, wide = (
        in_words(getattr(cells.grid_of(dtype), name))
        for dtype in ("bfloat16", "float32")
    )
    return f"default {narrow}; {wide} for float32 and float64"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse(arguments)
    if options.write_docs:
        return write_docs()
    if options.read:
        return read(options)
    reason = machine.find_gpu()
    if reason is not None:
        print(
            f"bench.py times cuflash on an NVIDIA GPU and found none "
            f"({reason}). Nothing was measured.",
            file=sys.stderr,
        )
        return 1
    record = {**machine.describe(), "family": options.family}
    say(", ".join(f"{k} {v}" for k, v in record.items() if v))
    try:
        if options.import_time:
            measure_imports(record)
        elif options.memory:
            measure_memory(options, record)
        elif options.decode:
            measure_decode(options, record)
        elif options.options:
            measure_options(options, record)
        else:
            measure_speed(options, record)
    except KeyboardInterrupt:
        record["complete"] = False
    finally:
        if options.output:
            save(options.output, record)
            say(f"written to {options.output}")
        if options.pictures and record.get("rows"):
            draw(options, record)
    if not record.get("complete", True):
        return command_line.stopped(
            f"results so far are in {options.output}"
            if options.output
            else "results so far are above; --output would save them"
        )
    return 1 if record.get("faults") else 0


def draw(options: argparse.Namespace, record: dict) -> None:
    """Draw the plots of a record."""
    if "options" in record:
        say("no pictures of calls with options")
        return
    try:
        if "decode" in record:
            from bench_parts import decode_pictures as pictures
        else:
            from bench_parts import pictures
    except ImportError as error:
        say(f"no pictures: {error}")
        return
    name = (options.output or options.read or Path("bench")).stem
    for path in pictures.write(options.pictures, name, record):
        say(f"drawn: {path}")


def read(options: argparse.Namespace) -> int:
    """Show and plot an earlier record."""
    try:
        record = json.loads(options.read.read_text())
        lines = report.lines(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(
            f"{options.read} is no record of bench.py: "
            f"{type(error).__name__}: {error}",
            file=sys.stderr,
        )
        return 1
    say("\n".join(lines))
    if record.get("summary"):
        show_summary(record["summary"])
    if options.pictures:
        draw(options, record)
    return 0


def write_docs(root: Path = Path(__file__).parents[1]) -> int:
    """Regenerate the tables of README and docs."""
    for path in (root / "README.md", root / "docs/benchmarks/README.md"):
        text = path.read_text(encoding="utf-8")
        new = markdown.updated(text, path.parent)
        if new != text:
            path.write_text(new, encoding="utf-8")
        marks = len(markdown.MARK.findall(text))
        say(f"{path}: {marks} tables{'' if new != text else ', as before'}")
    return 0


def measure_imports(record: dict) -> None:
    """Fill in and show `import_seconds`."""
    record["import_seconds"] = found = imports.measure()
    show(
        "Seconds, in a fresh process (filled cache: medians)",
        ["CUFLASH_COMPILE, cache", *next(iter(found.values()))],
        [
            [name, *(f"{s:.2f}" for s in steps.values())]
            for name, steps in found.items()
        ],
    )


def measure_memory(options: argparse.Namespace, record: dict) -> None:
    """Fill in and show `memory`."""
    from bench_parts import memory

    wanted = ["fa2", "cudnn"] if options.peer is None else options.peer
    found, words = peers.find_peers(wanted, options.dtype)
    record["memory"] = rows = []
    for head_dim in options.head_dim:
        rows += memory.peaks(options.dtype, head_dim, found)
    names = ["cuflash", *(peer.name for peer in found)]
    show(
        f"Peak MiB beyond the inputs, including the results: "
        f"{options.dtype}, seqlen {memory.SEQLEN}, causal",
        ["", "heads", "q", "a matrix of pairs", *names],
        [
            [
                f"{row['direction']} d {row['head_dim']}",
                str(row["heads"]),
                *(
                    "-" if n is None else f"{n / MIB:,.0f}"
                    for n in (
                        row["q_bytes"],
                        row["pairs_bytes"],
                        *(row["peak_bytes"][name] for name in names),
                    )
                ),
            ]
            for row in rows
        ],
    )
    for word in words:
        say(word)


def measure_speed(options: argparse.Namespace, record: dict) -> None:
    """Fill in `rows`, `ceilings`, `summary`; show each row once timed."""
    from bench_parts import compiling, speed, timing
    from bench_parts.runners import OURS
    from cuflash.backends import cupy as gpu

    found, words = peers.find_peers(options.peer, options.dtype)
    runners = [OURS, *found]
    names = [runner.name for runner in runners]
    for word in words:
        say(word)
    record["runners"] = {runner.name: runner.label for runner in runners}
    record["workload"] = workload(options)
    record["ceilings"] = timing.ceilings(options.dtype, options.seconds)
    say(", ".join(f"{k} {v:.0f}" for k, v in record["ceilings"].items()))

    grid = cells.grid(
        options.direction,
        options.dtype,
        options.head_dim,
        MASKS[options.causal],
        options.seqlen,
        options.tokens,
        options.width,
        options.kv_heads,
        options.heads,
        options.precision,
    )
    compiling.compile_all(grid, gpu.device(0))
    say(heading(names))
    measure_rows(
        record,
        grid,
        runners,
        options.seconds,
        lambda row: line(row, names),
        speed.measure,
    )
    record["summary"] = summary_of(record["rows"], names[1:])
    if record["summary"]:
        show_summary(record["summary"])
    say_faults(record)


def measure_options(options: argparse.Namespace, record: dict) -> None:
    """Fill in `rows` of calls with options; show each once timed."""
    from bench_parts import compiling, speed
    from bench_parts.runners import OURS, PLAIN
    from cuflash.backends import cupy as gpu

    record["options"] = options.options
    record["runners"] = {x.name: x.label for x in (OURS, PLAIN)}
    record["workload"] = workload(options)
    grid = option_cells.grid(
        options.options,
        options.direction,
        options.dtype,
        options.head_dim,
        MASKS[options.causal],
        options.seqlen,
        options.tokens,
        options.width,
        options.kv_heads,
        options.heads,
    )
    plain = [cell.plain for cell in grid]
    compiling.compile_all([*grid, *plain], gpu.device(0))
    say(report.option_heading())
    measure_rows(
        record,
        grid,
        [OURS, PLAIN],
        options.seconds,
        report.option_line,
        speed.measure,
    )
    say_faults(record)


def measure_decode(options: argparse.Namespace, record: dict) -> None:
    """Fill in `rows` of decode calls, `means`; show each row once timed."""
    from bench_parts import decode_report, decode_runners, decode_speed

    found, words = decode_runners.find(options.peer)
    runners = [decode_runners.OURS, *found, decode_runners.READING]
    names = [runner.name for runner in runners]
    for word in words:
        say(word)
    record["runners"] = {runner.name: runner.label for runner in runners}
    record["workload"] = "forward, seqlen_q 1, full, bfloat16"
    record["decode"] = decode.PROTOCOL
    say(decode_report.heading(names))
    measure_rows(
        record,
        decode.CELLS,
        runners,
        options.seconds,
        lambda row: decode_report.line(row, names),
        decode_speed.measure,
    )
    record["means"] = decode.means(record["rows"])
    say("\n".join(decode_report.lines_of_means(record["means"])))
    say_faults(record)


def workload(options: argparse.Namespace) -> str:
    """Describe the arrays of a run."""
    heads = f"heads * head_dim = {options.width}"
    if options.heads:
        heads = f"{options.heads} heads"
    text = (
        f"{options.tokens} tokens, {heads}, "
        f"(batch, seqlen, heads, head_dim), {options.dtype}"
    )
    if options.precision:
        text += f", precision {options.precision}"
    if options.kv_heads:
        text += f", {options.kv_heads} key heads"
    return text


def measure_rows(
    record: dict,
    grid: Iterable,
    runners: list,
    seconds: float,
    in_text: Callable[[dict], str],
    measure: Callable[[Any, list, float], dict],
) -> None:
    """Fill in `rows` and `faults`; show each row once timed."""
    record["rows"], record["faults"] = [], []
    for cell in grid:
        row = measure(cell, runners, seconds)
        record["rows"].append(row)
        record["faults"] += row["faults"]
        say(in_text(row))
        for word in row["faults"] + row["left_out"]:
            say(f"    {word}")


def say_faults(record: dict) -> None:
    """Print the number of wrong results, if any."""
    if record["faults"]:
        say(f"{len(record['faults'])} results are wrong and not timed")


if __name__ == "__main__":
    sys.exit(main())
