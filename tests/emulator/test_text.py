"""ptx_host.h has the same interface as common/ptx.cuh."""

import re

from cuflash.backends.emulator import runtime
from cuflash.build import source

PTX = source.KERNELS / "common/ptx.cuh"
(HOST,) = runtime.TWINS.values()

OWN = re.compile(r"^namespace emulator \{.*?^\}  // namespace", re.M | re.S)
FUNCTION = re.compile(
    r"(?P<template>template <[^>]*>\s+)?"
    r"(?:__device__ __forceinline__|EMULATOR_(?:CALLED|INLINED)|inline)\s+"
    r"(?P<result>\w+) (?P<name>\w+)(?P<special><\w+>)?"
    r"\((?P<parameters>(?:[^()]|\([^()]*\))*)\)\s*\{"
)


def functions(path):
    """Return the functions that a file defines for kernels, one line each.

    Leaves out the emulator's site parameter. A function with an overload for
    each Element appears twice.
    """
    text = re.sub(r"//.*|\\$", "", OWN.sub("", path.read_text()), flags=re.M)
    found = set()
    for function in FUNCTION.finditer(text.replace("ELEMENT", "Element")):
        template, result, name, special, parameters = (
            " ".join((part or "").split()) for part in function.groups()
        )
        parameters = re.sub(r",? ?EMULATOR_SITE", "", parameters)
        parameters = re.sub(r"\(&\w+\)", "(&)", parameters)
        line = f"{result} {name}{special}({parameters})"
        if re.search(r"\bElement\b", parameters):
            found |= {
                re.sub(r"\bElement\b", element, line)
                for element in ("float16", "bfloat16")
            }
        else:
            found.add(f"{template} {line}".strip())
    return found


def test_the_twin_has_the_same_functions():
    of_ptx = functions(PTX)
    assert "float exp2_approx(float x)" in of_ptx
    assert "template <int PENDING> void cp_async_wait()" in of_ptx
    assert "template <> u32 pack<float16>(float low, float high)" in of_ptx
    assert functions(HOST) == of_ptx


def test_every_function_is_parsed():
    """Also one whose parameters are formatted differently."""
    marked = re.findall(
        r"__device__ __forceinline__ [\w ]+?(\w+)[(<]", PTX.read_text()
    )
    found = {re.search(r"(\w+)(?:<\w+>)?\(", x)[1] for x in functions(PTX)}
    assert found == set(marked)


def test_the_twin_replaces_its_original():
    assert runtime.TWINS.keys() == {"common/ptx.cuh"}
    assert HOST.name == "ptx_host.h"
