"""Train a potential of atoms on forces: a loss on gradients of attention.

    python scripts/train_forces.py                     # some minutes
    python scripts/train_forces.py --steps 100 --seqlens 128 512
    OPENBLAS_NUM_THREADS=1 python scripts/train_forces.py --rounds 10

The potential (`force_parts/potential.py`) is attention over atoms, in float64
on NumPy arrays. Its forces come from `cuflash.backward`, the gradients of a
loss on them from `cuflash.double_backward`. The same step by whole score
matrices (`force_parts/dense.py`) is measured beside it: CPU time, which other
programs on the machine do not change, and memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import command_line
import cuflash
from force_parts import dense, measuring, training

WAYS = {"cuflash": cuflash, "dense": dense}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, number = parser.add_argument, command_line.number
    add("--steps", type=number, default=400, help="of training (400)")
    add("--atoms", type=number, default=48, help="in training (48)")
    add("--seqlens", type=number, nargs="+", metavar="ATOMS",
        default=[128, 256, 512, 1024, 2048, 4096],
        help="numbers of atoms of which a step is timed")  # fmt: skip
    add("--rounds", type=number, default=3,
        help="the least time of so many counts (3)")  # fmt: skip
    add("--largest-dense", type=number, default=2048, metavar="ATOMS",
        help="leave out dense steps of more atoms (2048)")  # fmt: skip
    add("--output", type=Path, default=Path("build/forces.png"),
        help="the picture (build/forces.png)")  # fmt: skip
    asked = parser.parse_args(arguments)
    command_line.check_file(parser, "--output", asked.output)
    return asked


def main(arguments: list[str] | None = None) -> int:
    """Train, measure, draw."""
    asked = parse(arguments)
    from force_parts import pictures  # needs Matplotlib

    print("step   error of forces   of unseen atoms")
    errors, unseen = training.train(cuflash, asked.atoms, asked.steps, _tell)
    print("\natoms  by        seconds  megabytes")
    costs = []
    for cost in measuring.costs(
        WAYS, asked.seqlens, asked.rounds, {"dense": asked.largest_dense}
    ):
        costs.append(cost)
        print(
            f"{cost.atoms:5}  {cost.by:8} {cost.seconds:8.3f}"
            f"{cost.nbytes / 1e6:11.1f}",
            flush=True,
        )
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    pictures.draw(asked.output, errors, unseen, costs)
    print(f"\n{asked.output}")
    return 0


def _tell(step: int, training: float, unseen: float) -> None:
    if step == 1 or step % 50 == 0:
        print(f"{step:4} {training:17.4f} {unseen:17.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
