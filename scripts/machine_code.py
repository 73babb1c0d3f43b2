"""Report which kernels' machine code a source change has changed.

    python scripts/machine_code.py --output before.json
    python scripts/machine_code.py --against before.json
    python scripts/machine_code.py --against before.json --only "sm90/*"

Compiles the kernels of a list of problems: the default plans, every family,
every option. Needs NVRTC but no GPU. With --against, lists the kernels whose
instructions differ, and exits with status 1 if there are any.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from command_line import number
from cuflash.build import nvrtc
from cuflash.errors import UnsupportedError
from cuflash.plans.kernel import KernelPlan
from cuflash.plans.plan import default_plans, device_of_arch, plan
from cuflash.plans.record import FamilyName
from cuflash.request.problem import Problem, Rotary

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.machine_code import instructions

# Each family's architecture and dtypes.
FAMILIES: tuple[tuple[str, FamilyName, str], ...] = (
    ("sm_90a", "sm90", "bfloat16"),
    ("sm_80", "decode", "bfloat16"),
    ("sm_90a", "decode_sm90", "bfloat16"),
    ("sm_80", "decode_simt", "float32"),
    ("sm_80", "decode_simt", "float64"),
    ("sm_80", "sm80", "bfloat16"),
    ("sm_80", "fma", "float32"),
    ("sm_80", "mma8_float32", "float32"),
    ("sm_80", "mma8_float64", "float64"),
    ("sm_80", "simt", "float32"),
)

OPTIONS: dict[str, dict] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 100)},
    "causal window": {"window": (100, None), "causal": True},
    "softcap": {"softcap": 30.0},
    "slopes": {"alibi_slopes": True, "causal": True},
    "slopes softcap": {"alibi_slopes": True, "softcap": 30.0},
    "bias": {"bias": "same"},
    "bias causal slopes": {
        "bias": "same",
        "causal": True,
        "alibi_slopes": True,
    },
    "dbias": {"bias": "same", "return_dbias": True},
    "mask": {"mask": True},
    "sink": {"sink": True, "return_dsink": True},
    "segment_ids": {"segment_ids": True},
    "segment_ids causal": {"segment_ids": True, "causal": True},
    "dropout": {"dropout": 0.1},
    "packed": {"num_sequences": 4, "batch": 1},
    "packed causal": {"num_sequences": 4, "batch": 1, "causal": True},
    "packed slopes": {"num_sequences": 4, "batch": 1, "alibi_slopes": True},
    "packed sink dropout": {
        "num_sequences": 4,
        "batch": 1,
        "sink": True,
        "dropout": 0.1,
    },
    "deterministic": {"deterministic": True},
    "dlse causal": {"dlse": True, "causal": True},
    "deterministic packed": {
        "deterministic": True,
        "num_sequences": 4,
        "batch": 1,
    },
    "negative scale": {"scale": -0.125},
}

# Head dimensions of q and k, and of v, without options.
HEADS = ((64, 64), (128, 128), (192, 128), (256, 256), (80, 96), (40, 320))


def _problem(
    direction: str, dtype: str, head_dim: int, head_dim_v: int, options: dict
) -> Problem:
    known = Problem(
        direction, dtype, 8, 2048, 2048, 16, 8, head_dim, head_dim_v, 0.125
    )  # fmt: skip
    if options.get("bias") == "same":
        options = {**options, "bias": dtype}
    if direction == "forward":
        backward = ("return_dbias", "return_dsink", "deterministic", "dlse")
        options = {k: v for k, v in options.items() if k not in backward}
    return replace(known, **options)


def cases() -> Iterator[tuple[str, str, KernelPlan]]:
    """A name independent of the constants' names, an arch, a kernel."""
    for arch in ("sm_80", "sm_90a", "sm_120"):
        for chosen in default_plans(device_of_arch(arch)):
            p = chosen.problem
            name = f"{p.direction} {p.dtype} {p.head_dim}"
            name += " causal" if p.causal else ""
            for kernel in chosen.kernels:
                yield f"{arch} default {name}", arch, kernel
    for arch, family, dtype in FAMILIES:
        for direction in ("forward", "backward"):
            for name, heads, options in _variants():
                problem = _problem(direction, dtype, *heads, options)
                if family == "mma8_float32":
                    problem = replace(problem, precision="mma8_float32")
                device = device_of_arch(arch)
                try:
                    chosen = plan(problem, device, family)
                except UnsupportedError:  # tf32x3 has heads up to 256
                    continue
                if family.startswith("decode") and family != chosen.family:
                    continue  # others have it
                for kernel in chosen.kernels:
                    of = f"{family} {dtype}" if "_" in family else family
                    yield f"{arch} {of} {direction} {name}", arch, kernel
    for dtype in ("bfloat16", "float32", "float64"):
        problem = Problem("merge", dtype, 8, 2048, 0, 16, 16, 64, 64, 1.0)
        for kernel in plan(problem, device_of_arch("sm_80")).kernels:
            yield f"sm_80 merge {dtype}", "sm_80", kernel
        rotary = Rotary(64, 2048, dtype, "int32", False, False)
        problem = replace(problem, direction="rotary", rotary=rotary)
        for kernel in plan(problem, device_of_arch("sm_80")).kernels:
            yield f"sm_80 rotary {dtype}", "sm_80", kernel


def _variants() -> Iterator[tuple[str, tuple[int, int], dict]]:
    for name, options in OPTIONS.items():
        yield f"64 {name}", (64, 64), options
        if name in ("window", "bias", "segment_ids", "softcap", "slopes"):
            yield f"128 {name}", (128, 128), options
    for heads in HEADS[1:]:
        for name in ("plain", "causal"):
            yield f"{heads[0]}/{heads[1]} {name}", heads, OPTIONS[name]


def digest(task: tuple[str, KernelPlan]) -> str:
    """A hash of a kernel's instructions."""
    arch, kernel = task
    return hashlib.sha256(instructions(kernel, arch)).hexdigest()[:16]


def compiled(only: str, jobs: int) -> dict[str, str]:
    """The hash of each kernel's code, by name."""
    tasks: dict[tuple[str, KernelPlan], list[str]] = {}
    for name, arch, kernel in cases():
        if fnmatch.fnmatch(kernel.file, only):
            key = f"{name}: {kernel.entry}"
            tasks.setdefault((arch, kernel), []).append(key)
    found = {}
    with ProcessPoolExecutor(jobs) as pool:
        for i, (names, code) in enumerate(
            zip(tasks.values(), pool.map(digest, tasks), strict=True)
        ):
            found.update(dict.fromkeys(names, code))
            print(f"\r{i + 1} of {len(tasks)} kernels", end="", flush=True)
    print()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Compile, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, help="write the hashes to a JSON file")
    add("--against", type=Path, help="a JSON file to compare with")
    add("--only", default="*", help="pattern of kernel files")
    add("--jobs", type=number, default=os.cpu_count())
    given = parser.parse_args(arguments)
    now = compiled(given.only, given.jobs)
    if given.output:
        given.output.write_text(json.dumps(now, indent=0))
    if not given.against:
        return 0
    before = json.loads(given.against.read_text())
    unknown = sorted(now.keys() - before.keys())
    changed = sorted(x for x in now.keys() & before.keys()
                     if now[x] != before[x])  # fmt: skip
    for name in unknown:
        print(f"not in {given.against}: {name}")
    for name in changed:
        print(f"changed: {name}")
    print(
        f"{len(now) - len(unknown) - len(changed)} kernels with the same"
        f" instructions, {len(changed)} changed; NVRTC"
        f" {nvrtc.version()}"
    )
    return 1 if changed or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
