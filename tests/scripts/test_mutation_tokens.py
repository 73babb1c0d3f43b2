"""mutation_parts/tokens.py: kernel text as tokens, brackets, functions."""

import pytest

from mutation_parts.tokens import Source, tokens_of

TEXT = """\
#define NOT_A_TOKEN 1
// nor this
template <int N> struct Ring {
    int stage = 0;
    __device__ __forceinline__ void next() { ++stage; }
};
static constexpr int steps(int n) { return n / 2; }
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
kernel(const Arguments& all) {
    const auto step = [&](int i) { return i >> 1; };
    float x[2] = {1.5e-3f, 0x7Fu};
}
"""


def texts(text):
    return [str(x) for x in tokens_of(text)]


def test_comments_and_preprocessor_lines_are_no_tokens():
    assert texts('a /* b\n c */ += 1; // d\n#line 1 "e"\nf') == [
        "a", "+=", "1", ";", "f"
    ]  # fmt: skip


def test_numbers_and_strings_are_one_token_each():
    assert texts('0x7Fu 1.5e-3f .5 "a \\" b"') == [
        "0x7Fu", "1.5e-3f", ".5", '"a \\" b"'
    ]  # fmt: skip


def test_two_templates_that_end_are_no_shift():
    source = Source("a.cu", "f<g<1>>(x >> 2)")
    assert [i for i in range(len(source.tokens)) if source.binary(i)] == [9]
    assert source.match[1] == 6 and source.match[3] == 5


@pytest.mark.parametrize(
    ("text", "binary"), [("a - b", True), ("f(-b)", False), ("a, -b", False)]
)
def test_a_binary_operator_has_space_on_both_sides(text, binary):
    source = Source("a.cu", text)
    minus = [str(x) for x in source.tokens].index("-")
    assert source.binary(minus) == binary


def test_functions():
    source = Source("a.cu", TEXT)
    found = [(x.name, x.constant) for x in source.functions]
    assert found == [
        ("Ring::next", False), ("steps", True), ("kernel", False)
    ]  # fmt: skip
    kernel = source.functions[-1]
    assert source.joined(kernel.first, kernel.first + 3) == "const auto step"


def test_lines():
    source = Source("a.cu", TEXT)
    stage = next(x for x in source.tokens if x.text == "stage")
    assert source.line(stage.start) == 4


def test_operands():
    source = Source("a.cu", "x = a + f(b, c) * d - e;")
    plus, times, minus = 3, 10, 12
    assert source.joined(plus + 1, source.right_end(plus)) == (
        "f ( b , c ) * d"
    )
    assert source.joined(source.left_start(times), times) == "f ( b , c )"
    assert source.left_start(minus) == 2
