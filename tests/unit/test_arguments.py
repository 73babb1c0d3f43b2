"""Argument structs: compilers and NumPy lay them out alike."""

import subprocess

import numpy as np
import pytest

from cuflash.backends.emulator import runtime
from cuflash.build import nvrtc, source
from cuflash.launch import structs as abi
from cuflash.launch.template import Template
from helpers.compare import assert_arrays_equal
from helpers.host_compiler import needs_compiler
from helpers.kernels import small_kernel

STRUCTS = {x: y for x, y in vars(abi).items() if isinstance(y, np.dtype)}
TYPES = (source.KERNELS / "common/types.cuh").read_text()
GENERATED = '#include "common/arguments.cuh"'


def text():
    """Return the beginning of every kernel's text."""
    constants = '#line 1 "common/plan_constants.cuh"'
    return source.build(small_kernel()).partition(constants)[0]


def layout_checks():
    """Return assertions that a compiler lays structs out like NumPy."""
    for name, dtype in STRUCTS.items():
        yield f"static_assert(sizeof({name}) == {dtype.itemsize});"
        for field, (kind, offset, *_) in dtype.fields.items():
            yield f"static_assert(offsetof({name}, {field}) == {offset});"
            size = f"sizeof({name}::{field})"
            yield f"static_assert({size} == {kind.itemsize});"


def test_the_text_has_every_struct_once():
    for name in STRUCTS:
        words = f"struct {name} {{", f"struct alignas(64) {name} {{"
        assert sum(text().count(x) for x in words) == 1
    assert abi.c_text().count("struct ") == len(STRUCTS)


def test_the_text_stands_after_the_element_types():
    """And no other text defines an argument struct."""
    before, _, after = TYPES.partition(GENERATED)
    assert "struct alignas(2) bfloat16" in before
    assert "Arguments {" not in before + after
    lines = source.lines_by_place(text())
    assert ("common/arguments.cuh", 1) in lines
    assert abi.c_text().splitlines()[0] == lines["common/arguments.cuh", 1]


def test_the_text_is_written_as_kernels_are():
    assert abi.c_text().isascii()
    assert max(map(len, abi.c_text().splitlines())) <= 100


def test_an_error_in_it_is_shown_there():
    shown = source.excerpt(text(), "common/arguments.cuh", 2)
    assert "common/arguments.cuh" in shown
    assert any(line.startswith(">    2 | struct Strides") for line in shown)


@needs_compiler
def test_a_host_compiler_lays_the_structs_out_like_numpy(tmp_path):
    file = tmp_path / "layout.cpp"
    inline = "#define __device__\n#define __forceinline__ inline"
    checks = ["#include <cstddef>", inline, text(), *layout_checks()]
    file.write_text("\n".join(checks))
    subprocess.run(
        [*runtime.host_compiler(), "-std=c++20", "-fsyntax-only", file],
        check=True,
    )


def test_nvrtc_lays_the_structs_out_like_numpy(monkeypatch):
    offsetof = "#define offsetof(s, m) __INTADDR__(&((s*)0)->m)"
    checks = [text(), offsetof, *layout_checks()]
    assert len(checks) > 120
    monkeypatch.setattr(source, "build", lambda kernel: "\n".join(checks))
    nvrtc._compile(small_kernel(), "sm_80")  # raises CompileError


def leaves(value):
    """The numbers and TensorMaps of a struct, in order."""
    if value.dtype == np.uint64 and value.ndim:  # an array of pointers
        yield from value
        return
    if value.dtype.names is None or value.dtype == abi.TensorMap:
        yield value
        return
    for name in value.dtype.names:
        yield from leaves(value[name])


@pytest.mark.parametrize("name", [x for x in STRUCTS if "Arguments" in x])
def test_a_template_lacks_maps_and_pointers_alone(name):
    struct = getattr(abi, name)
    ones = np.frombuffer(bytes([1]) * struct.itemsize, struct)[0]
    parts = [ones, ones["arrays"]] if "arrays" in struct.names else [ones]
    constants = {
        name: part[name]
        for part in parts
        for name in part.dtype.names
        if part.dtype[name].base not in (np.uint64, abi.TensorMap)
    }
    constants.pop("arrays", None)
    kinds = [x.dtype for x in leaves(ones)]
    maps = [bytes([i]) * 128 for i in range(kinds.count(abi.TensorMap))]
    pointers = [*range(kinds.count(np.uint64))]
    template = Template(struct, **constants)
    filled = [*leaves(np.frombuffer(template.fill(maps, pointers), struct)[0])]
    for value, one in zip(filled, leaves(ones), strict=True):
        if value.dtype == abi.TensorMap:
            assert value.tobytes() == maps.pop(0)
        else:
            is_pointer = value.dtype == np.uint64
            expected = pointers.pop(0) if is_pointer else one
            assert_arrays_equal(value, expected, "value")
    assert not maps and not pointers
