"""The one string that the compiler gets: order, splicing, line numbers."""

from types import SimpleNamespace

import pytest

from cuflash import source
from cuflash.errors import CompileError


def kernel(**constants):
    return SimpleNamespace(
        file="kernel.cu", constants=tuple(constants.items())
    )


@pytest.fixture
def folder(tmp_path):
    def write(**files):
        files.setdefault("types", "struct bfloat16 {};\n")
        files.setdefault("kernel", "// nothing\n")
        for name, text in files.items():
            suffix = ".cu" if name == "kernel" else ".cuh"
            (tmp_path / (name + suffix)).write_text(text)
        return tmp_path

    return write


def test_constants_become_declarations(folder):
    text = source.build(
        kernel(CAUSAL=True, BLOCK_Q=64, Element="bfloat16"), folder()
    )
    assert "constexpr bool CAUSAL = true;\n" in text
    assert "constexpr int BLOCK_Q = 64;\n" in text
    assert "using Element = bfloat16;\n" in text


def test_a_float_is_no_constant(folder):
    with pytest.raises(TypeError, match="constant SCALE is 0.5, expected"):
        source.build(kernel(SCALE=0.5), folder())


def test_types_come_first_then_constants_then_the_kernel(folder):
    text = source.build(kernel(Element="bfloat16"), folder(kernel="int x;\n"))
    places = [
        text.index(s)
        for s in ("struct bfloat16", "using Element", "int x;")
    ]
    assert places == sorted(places)


def test_a_file_is_spliced_once_however_often_it_is_included(folder):
    path = folder(
        kernel='#include "types.cuh"\n#include "a.cuh"\n#include "b.cuh"\n',
        a='#pragma once\n#include "b.cuh"\nint in_a;\n',
        b="#pragma once\nint in_b;\n",
    )
    text = source.build(kernel(), path)
    for once in ("struct bfloat16", "int in_a;", "int in_b;"):
        assert text.count(once) == 1
    assert text.index("in_b") < text.index("in_a")
    assert "#include" not in text and "#pragma once" not in text


def test_every_line_keeps_its_place(folder):
    path = folder(
        kernel='// head\n#include "a.cuh"\nint after;\n',
        a="#pragma once\n\nint in_a;\n",
    )
    lines = source.lines_by_place(source.build(kernel(X=1, Y=2), path))
    assert lines["kernel.cu", 1] == "// head"
    assert lines["kernel.cu", 3] == "int after;"
    assert lines["a.cuh", 3] == "int in_a;"
    assert lines["constants", 2] == "constexpr int Y = 2;"


@pytest.mark.parametrize("include", ['"absent.cuh"', "<cuda_fp16.h>"])
def test_only_files_of_the_folder_can_be_included(folder, include):
    path = folder(kernel=f"\n#include {include}\n")
    with pytest.raises(CompileError, match=r"kernel.cu\(2\) includes"):
        source.build(kernel(), path)
