"""The source text for the compiler: order, includes, line numbers."""

from types import SimpleNamespace

import pytest

from cuflash.build import source
from cuflash.errors import CompileError


def kernel(**constants):
    return SimpleNamespace(
        file="kernel.cu", constants=tuple(constants.items()), expression=""
    )


@pytest.fixture
def folder(tmp_path):
    def write(**files):
        common = tmp_path / "common"
        common.mkdir()
        (common / "types.cuh").write_text("struct bfloat16 {};\n")
        (common / "constants.cuh").write_text(
            '#include "common/types.cuh"\n'
            '#include "common/plan_constants.cuh"\n'
        )
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
        text.index(s) for s in ("struct bfloat16", "using Element", "int x;")
    ]
    assert places == sorted(places)


def test_a_file_that_changes_is_read_again(folder):
    path = folder(kernel="int before;\n")
    assert "int before;" in source.build(kernel(), path)
    (path / "kernel.cu").write_text("int after;\n")
    assert "int after;" in source.build(kernel(), path)


def test_a_file_is_spliced_once_however_often_it_is_included(folder):
    path = folder(
        kernel='#include "common/types.cuh"\n#include "a.cuh"\n'
        '#include "b.cuh"\n',
        a='#pragma once\n#include "b.cuh"\nint in_a;\n',
        b="#pragma once\nint in_b;\n",
    )
    text = source.build(kernel(), path)
    for once in ("struct bfloat16", "int in_a;", "int in_b;"):
        assert text.count(once) == 1
    assert text.index("in_b") < text.index("in_a")
    assert "#include" not in text and "#pragma once" not in text


def test_every_line_keeps_its_number(folder):
    path = folder(
        kernel='// head\n#include "a.cuh"\nint after;\n',
        a="#pragma once\n\nint in_a;\n",
    )
    lines = source.lines_by_place(source.build(kernel(X=1, Y=2), path))
    assert lines["kernel.cu", 1] == "// head"
    assert lines["kernel.cu", 3] == "int after;"
    assert lines["a.cuh", 3] == "int in_a;"
    assert lines["common/plan_constants.cuh", 2] == "constexpr int Y = 2;"


@pytest.mark.parametrize("include", ['"absent.cuh"', "<cuda_fp16.h>"])
def test_only_files_of_the_folder_can_be_included(folder, include):
    path = folder(kernel=f"\n#include {include}\n")
    with pytest.raises(CompileError, match=r"kernel.cu\(2\) includes"):
        source.build(kernel(), path)


def test_a_kernel_from_another_folder_includes_files_of_this_one(
    folder, tmp_path_factory
):
    own = tmp_path_factory.mktemp("own") / "small.cu"
    own.write_text('#include "a.cuh"\nint in_small;\n')
    small = SimpleNamespace(file=str(own), constants=(), expression="")
    lines = source.lines_by_place(source.build(small, folder(a="int in_a;")))
    assert lines["a.cuh", 1] == "int in_a;"
    assert lines[str(own), 2] == "int in_small;"


def test_a_twin_stands_in_for_a_file_under_its_own_name(
    folder, tmp_path_factory
):
    twin = tmp_path_factory.mktemp("twins") / "a_host.h"
    twin.write_text('#pragma once\n#include "b.cuh"\nint in_twin;\n')
    path = folder(
        kernel='#include "a.cuh"\n#include "a.cuh"\n', a="asm;", b="int in_b;"
    )
    text = source.build(kernel(), path, twins={"a.cuh": twin})
    assert "asm" not in text and text.count("int in_twin;") == 1
    lines = source.lines_by_place(text)
    assert lines["b.cuh", 1] == "int in_b;"
    assert lines["a_host.h", 3] == "int in_twin;"


def test_an_excerpt_shows_the_lines_around():
    text = '#line 1 "a.cuh"\n' + "\n".join("abcdefghijkl")
    shown = source.excerpt(text, "a.cuh", 6)
    assert shown[:3] == ["", "a.cuh", "     2 | b"]
    assert shown[6:8] == [">    6 | f", "     7 | g"]
    assert source.excerpt(text, "b.cuh", 6) == []
