"""Runs blocks and doctests; each page and module in a process of its own."""

from __future__ import annotations

import doctest
import functools
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_extra
from example_parts.pages import Block

ROOT = Path(__file__).parents[2]

# What the doctests of some folders of cuflash need.
NEEDS_OF = {
    "torch": "torch",
    "flash_attn": "torch",
    "jax": "jax",
    "backends/emulator": "compiler",
}


@functools.cache
def is_there(need: str) -> bool:
    """Whether this machine has what a block needs."""
    if need == "gpu":
        has_cupy = importlib.util.find_spec("cupy") is not None
        return has_cupy and cuda_extra.driver_version() is not None
    if need == "launcher":  # of processes on several GPUs
        return is_there("gpu") and "WORLD_SIZE" in os.environ
    if need == "compiler":
        compilers = (os.environ.get("CXX"), "g++", "clang++")
        return any(shutil.which(name) for name in compilers if name)
    return importlib.util.find_spec(need) is not None


def missing(needs: tuple[str, ...]) -> list[str]:
    """Return those that are not there."""
    return [need for need in needs if not is_there(need)]


def run_blocks(blocks: list[Block]) -> None:
    """Run a page's blocks as one program; the first error is raised.

    Its traceback shows the page's lines.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        if block.is_session:
            _run_session(block, names)
            continue
        at_its_line = "\n" * (block.line - 1) + block.code
        exec(compile(at_its_line, str(block.page), "exec"), names)


def _run_session(block: Block, names: dict[str, object]) -> None:
    """Run a block of prompts and results; names remain for later blocks."""
    example = doctest.DocTestParser().get_doctest(
        block.code, names, block.page.name, str(block.page), block.line - 1
    )
    runner = doctest.DocTestRunner()
    if runner.run(example, clear_globs=False).failed:
        raise AssertionError(f"{block.page}:{block.line}: see above")
    names.update(example.globs)


def modules_with_doctests() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules of cuflash that have doctests, and their needs."""
    for folder, package in (
        ("cuflash", "cuflash"),
        ("reference", "cuflash/reference"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>>" not in path.read_text(encoding="utf-8"):
                continue
            inside = path.relative_to(ROOT / folder).with_suffix("")
            dotted = str(Path(package) / inside).replace("/", ".")
            yield dotted.removesuffix(".__init__"), _needs_of(inside)


def _needs_of(module: Path) -> tuple[str, ...]:
    """Return the needs of a module, given by its path in the package."""
    return tuple(
        need
        for folder, need in NEEDS_OF.items()
        if module.is_relative_to(folder)
    )


def run_doctests(module: str) -> int:
    """Run a module's doctests, print failures, return their number."""
    return doctest.testmod(importlib.import_module(module)).failed


def in_checkout() -> None:
    """Let this process import this checkout's cuflash."""
    sys.path.insert(0, str(ROOT))
