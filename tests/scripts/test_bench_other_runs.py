"""Tables of libraries that were measured in other runs."""

import pytest

from bench_parts import markdown, other_runs


def row(direction, seqlen, **more):
    place = {"head_dim": 64, "causal": True, "seqlen": seqlen}
    return {"direction": direction, **place, **more}


OURS = {
    "rows": [
        row("forward", 512, tflops={"cuflash": 300.0, "cudnn": 200.0}),
        row("forward", 1024, tflops={"cuflash": 300.0, "cudnn": 400.0}),
        row("forward", 2048, tflops={"cuflash": 300.0, "cudnn": 400.0}),
    ]
}
OTHERS = {
    "rows": [
        row("forward", 512, over_cudnn={"fa3": 2.0, "fa4": 1.0}),
        row("forward", 1024, over_cudnn={"fa3": 0.5}),
    ]
}


def test_speeds_are_multiples_of_cudnns():
    heads, rows = other_runs.table(OURS, OTHERS, "forward")
    assert heads[1:] == ["512", "1,024"]  # 2,048 was not measured elsewhere
    assert rows == [
        ["head_dim 64, causal", "1.50 · 2.00 · 1.00", "0.75 · 0.50 · –"]
    ]


def test_a_library_that_ran_beside_ours_counts_with_its_speed_there():
    tflops = {"cuflash": 300.0, "cudnn": 200.0, "fa4": 250.0}
    ours = {"rows": [row("forward", 512, tflops=tflops)]}
    _, rows = other_runs.table(ours, OTHERS, "forward")
    assert rows == [["head_dim 64, causal", "1.50 · 2.00 · 1.25"]]


def test_means_are_over_the_best_in_each_cell():
    """0.75 of FlashAttention-3's speed in a cell, of cuDNN's in another."""
    heads, rows = other_runs.table_of_means(OURS, OTHERS)
    found = dict(zip(heads, rows[0], strict=True))
    assert len(rows) == 1 and found["geometric mean"] == "forward, 2 cells"
    assert found["over FlashAttention-3"] == "1.061"  # of 0.75 and 1.5
    assert found["over FlashAttention-4"] == "1.500"
    assert found["over FoldAttention, deterministic"] == "–"
    assert found["over the best in each cell"] == "0.750"
    assert (found["worst"], found["cells behind"]) == ("0.75", "2")


def test_a_mark_names_two_files_and_a_direction():
    wanted = markdown.parse("a.json b.json elsewhere forward")
    assert wanted.elsewhere and wanted.files == ["a.json", "b.json"]
    assert wanted.directions == ["forward"]
    with pytest.raises(ValueError, match="the mark"):
        markdown.parse("a.json elswhere")
