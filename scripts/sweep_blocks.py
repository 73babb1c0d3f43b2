"""Find the fastest tile sizes for this machine's GPU.

    python scripts/sweep_blocks.py                      # the benchmarks' grid
    python scripts/sweep_blocks.py --head-dim 128 --causal --direction backward
    python scripts/sweep_blocks.py --budget 5m          # limit the time
    python scripts/sweep_blocks.py --dtype float64 --budget 80s
    python scripts/sweep_blocks.py --family tf32x3      # float32 by tf32 parts
    python scripts/sweep_blocks.py --dry-run --arch sm_80     # without a GPU
    python scripts/sweep_blocks.py --compare            # results so far
    python scripts/sweep_blocks.py --install            # into the package

Every tile that a kernel can run is compiled, checked against plain attention
in float64, and timed in turn with the others; plan.py then uses the fastest.
Measurements are saved: the same command resumes a stopped sweep. Method:
docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_args

# An import need not compile the default kernels: the sweep does not use them.
os.environ.setdefault("CUFLASH_COMPILE", "lazy")

import command_line  # noqa: E402
from bench_parts import cells  # noqa: E402
from bench_parts.options import WithDefaults, in_words  # noqa: E402
from bench_parts.report import figure, save, say, show  # noqa: E402
from command_line import number  # noqa: E402
from cuflash import folders
from cuflash.build import nvrtc  # noqa: E402
from cuflash.errors import CuflashError  # noqa: E402
from cuflash.plans import tiles  # noqa: E402
from cuflash.plans.plan import Device, FamilyName, device_of_arch  # noqa: E402
from cuflash.request.validate.shapes import MAX_HEAD_DIM_V  # noqa: E402
from sweep_parts import dry, measure, space, tables  # noqa: E402
from sweep_parts.record import Record  # noqa: E402
from sweep_parts.worker import NoGpu, Worker, open_gpu  # noqa: E402

START_SECONDS = 180.0
DTYPES = ("bfloat16", "float16", "float32", "float64")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=WithDefaults,
    )
    add = parser.add_argument
    add("--family", nargs="+", choices=get_args(FamilyName), default=None,
        help="default: the family that calls use; tf32x3: that of "
        "precision='tf32x3'")  # fmt: skip
    add("--direction", nargs="+", choices=cells.DIRECTIONS,
        default=list(cells.DIRECTIONS))  # fmt: skip
    add("--dtype", choices=tuple(DTYPES), default=None,
        help="default: that of --family, or bfloat16")  # fmt: skip
    add("--head-dim", nargs="+", type=number, default=list(cells.HEAD_DIMS))
    add("--causal", nargs="?", choices=("yes", "no", "both"), const="yes",
        default="both")  # fmt: skip
    add("--seqlen", nargs="+", type=number, default=None,
        help=lengths("seqlens"))  # fmt: skip
    add("--tokens", type=number, default=None,
        help=f"batch * seqlen; {lengths('tokens')}")  # fmt: skip
    add("--width", type=number, default=None,
        help=f"heads * head_dim; {lengths('width')}")  # fmt: skip
    add("--block-q", nargs="+", type=number, help="only these")
    add("--block-k", nargs="+", type=number, help="only these")
    add("--budget", type=seconds, default=None,
        help="stop after this time, such as 90s, 5m or 1h")  # fmt: skip
    add(
        "--seconds",
        type=float,
        default=0.05,
        help="seconds to time each cell and each of its best tiles",
    )
    add("--jobs", type=number, default=_cores(),
        help="kernels compiled in parallel")  # fmt: skip
    add("--output", type=Path, default=Path("sweep_output"),
        help="folder for measurements and pictures")  # fmt: skip
    add("--dry-run", action="store_true",
        help="only compile, without a GPU: registers, spills, shared "
        "memory, occupancy, predicted traffic")  # fmt: skip
    add("--arch", default=None, help="with --dry-run: another GPU's, such "
        "as sm_80; default sm_90a without a GPU")  # fmt: skip
    add("--install", action="store_true", help="write the table into the "
        "package, not into this machine's cache folder")  # fmt: skip
    add("--measured", action="store_true", help="measure nothing: make "
        "table and pictures from the records in --output")  # fmt: skip
    add("--compare", nargs="?", type=Path, const=True, default=None,
        metavar="TABLE", help="measure nothing: compare today's tiles with "
        "the measured ones, or with another table")  # fmt: skip
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or space.dtype_of(options.family)
    for d in options.head_dim:
        if d > min(MAX_HEAD_DIM_V, options.width or MAX_HEAD_DIM_V):
            parser.error(
                f"--head-dim {d}: at most {MAX_HEAD_DIM_V}, and at most "
                "--width"
            )
    tokens = options.tokens or cells.TOKENS
    if options.seqlen and max(options.seqlen) > tokens:
        parser.error(f"--seqlen {max(options.seqlen)}: at most --tokens")
    options.cells = lambda group: group.cells(
        options.seqlen, options.tokens, options.width
    )
    if options.arch and not options.dry_run:
        parser.error("--arch requires --dry-run")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds}: must be above 0")
    if options.compare is None and not options.measured:
        command_line.check_folder(parser, "--output", options.output)
    options.chosen = lambda listed: [
        x
        for x in listed
        if x.tile.block_q in (options.block_q or [x.tile.block_q])
        and x.tile.block_k in (options.block_k or [x.tile.block_k])
    ]
    return options


def lengths(name: str) -> str:
    """Describe an option's default."""
    narrow, wide, simt = (
        in_words(getattr(space.lengths_of(family), name))
        for family in ("sm90", "fma", "simt")
    )
    return (
        f"default {narrow}; {wide} for float32 and float64, {simt} for simt, "
        "so that a call takes at most about 20 ms"
    )


def seconds(text: str) -> float:
    """Read a time: 90, 90s, 5m, 1.5h."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)([smh]?)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; expected one such as 90s, 5m or 1h"
        )
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main(arguments: list[str] | None = None, make_gpu=open_gpu) -> int:
    """Run the sweep; return the exit status."""
    options = parse(arguments)
    until = time.monotonic() + (options.budget or float("inf"))
    try:
        if options.compare is not None:
            return compare(options)
        if options.measured:
            record = newest(options.output)
            return finish(options, record, [])
        if options.dry_run:
            return dry_run(options, until, make_gpu)
        return sweep(options, until, make_gpu)
    except (CuflashError, OSError) as error:
        print(f"sweep_blocks.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return command_line.stopped("nothing was written")


def sweep(options: argparse.Namespace, until: float, make_gpu) -> int:
    """Measure, and write the results."""
    with Worker(make_gpu) as worker:
        try:
            device, machine = worker.ask(START_SECONDS, "describe")
        except NoGpu as error:
            print(
                "sweep_blocks.py times kernels on an NVIDIA GPU and found "
                f"none ({error}). Nothing was measured. --dry-run compiles "
                "the kernels and shows the results that need no GPU.",
                file=sys.stderr,
            )
            return 1
        machine["plans_see"] = asdict(device)
        say(", ".join(f"{k} {v}" for k, v in machine.items() if v))
        groups = groups_of(options, device)
        if not groups:
            say("no kernels match: nothing to sweep")
            return 1
        record = Record.open(file_of(options.output, device), machine)
        made = measure.Sweep(worker, record, device, options)
        try:
            made.run(groups, until)
        except KeyboardInterrupt:
            record.save()
            finish(options, record, made.left_out)
            return command_line.stopped(
                f"measurements are in {record.path}; the same command resumes"
            )
        record.save()
    return finish(options, record, made.left_out)


def groups_of(
    options: argparse.Namespace, device: Device
) -> list[space.Group]:
    """Return the groups that the options select."""
    masks = {"yes": [True], "no": [False], "both": [False, True]}
    return space.groups(
        options.family, options.direction, options.dtype, options.head_dim,
        masks[options.causal], device,
    )  # fmt: skip


def file_of(folder: Path, device: Device) -> Path:
    """Return the file of a device's record."""
    return folder / f"sm_{device.capability}.measured.json"


def newest(folder: Path) -> Record:
    """Return the newest record."""
    files = sorted(
        folder.glob("sm_*.measured.json"), key=lambda x: x.stat().st_mtime
    )
    if not files:
        raise FileNotFoundError(f"no measurements yet in {folder}")
    return Record.read(files[-1])


def finish(
    options: argparse.Namespace, record: Record, left_out: list[str]
) -> int:
    """Show the table, write it where plan.py reads it, draw pictures."""
    found = tables.verdicts(record)
    for reason in left_out:
        say(f"left out: {reason}")
    if not found:
        say("no cell was measured completely")
        return 1
    show_verdicts(found)
    folder = tiles.TABLES if options.install else folders.tile_tables()
    path = tables.merge(folder, record)
    say(f"{path} has these tiles; plan.py uses them from now on")
    if options.install and tables.shadowed(folder):
        say(f"the tables in {folders.tile_tables()} take precedence here")
    try:
        from sweep_parts import pictures
    except ImportError as error:
        say(f"no pictures: {error}")
        return 0
    try:
        for picture in pictures.write(options.output, record):
            say(f"drawn: {picture}")
    except OSError as error:  # the table is written
        say(f"no pictures: {error}")
    return 0


def show_verdicts(found: list[tables.Verdict]) -> None:
    """Print one line per cell, and the mean gain."""
    ordered = sorted(found, key=lambda x: (str(x.group), x.seqlen))
    show(
        "Today's tile and the best one",
        ["cell", "seqlen", "today", "ms", "best", "ms", "TFLOP/s", "gain"],
        [
            [
                str(x.group),
                f"{x.seqlen:,}",
                space.words(x.today),
                _ms(x.today_ms),
                "the same" if x.best == x.today else space.words(x.best),
                _ms(x.best_ms),
                "-" if x.tflops is None else figure(x.tflops),
                "-" if x.gain is None else f"{x.gain:+.1%}",
            ]
            for x in ordered
        ],
    )
    gains = [1 + x.gain for x in found if x.gain is not None]
    if gains:
        changed = sum(x.best != x.today for x in found)
        say(
            f"{len(found)} cells, {changed} with another tile than today; "
            f"geometric mean gain {cells.geometric_mean(gains) - 1:.1%}"
        )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def compare(options: argparse.Namespace) -> int:
    """Compare today's tiles with a record's or a table's."""
    if options.compare is True:
        show_verdicts(tables.verdicts(newest(options.output)))
        return 0
    path = options.compare
    arch = path.stem
    try:
        record = newest(options.output)
        device = record.device
    except FileNotFoundError:
        record = None
        device = device_of_arch("sm_90a" if arch == "sm_90" else arch)
    show_verdicts(tables.against(path, device, record))
    return 0


def dry_run(options: argparse.Namespace, until: float, make_gpu) -> int:
    """Compile, and show the results that need no GPU."""
    device = device_of_arch(options.arch or "sm_90a")
    if not options.arch:
        with Worker(make_gpu) as worker:
            try:
                device, _ = worker.ask(START_SECONDS, "describe")
            except NoGpu:
                say(f"no GPU here: compiling for {device.arch}; see --arch")
    if device.capability not in nvrtc.capabilities():
        raise CuflashError(
            f"--arch got {options.arch!r}, which NVRTC "
            f"{nvrtc.version()} does not compile for"
        )
    groups = groups_of(options, device)
    if not groups:
        say("no kernels match: nothing to compile")
        return 1
    path = options.output / f"{device.arch}.dry.json"
    content = {"device": asdict(device), "nvrtc": nvrtc.version(),
               "complete": False, "rows": []}  # fmt: skip
    rows = content["rows"]
    try:
        content["complete"] = dry.run(groups, device, options, until, rows)
    except KeyboardInterrupt:
        if not rows:
            return command_line.stopped("nothing was compiled")
        save(path, content)
        return command_line.stopped(f"results so far are in {path}")
    save(path, content)
    say(f"written to {path}")
    return 1 if any("fault" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
