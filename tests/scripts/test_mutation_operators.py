"""mutation_parts/operators.py: what each rule makes of a snippet."""

import pytest

from mutation_parts import mutants, operators
from mutation_parts.tokens import Source, tokens_of


def texts(text):
    return [str(x) for x in tokens_of(text)]


def changed(operator, statement):
    """Return the bodies that an operator makes from one."""
    source = Source("a.cu", f"void f() {{ {statement} }}")
    found = []
    for mutant in mutants.by_rules(source):
        if mutant.id.split("/")[2] == operator:
            found.append(texts(mutant.applied(source.text)[11:-2]))
    return found


RULES = [
    ("drop-sync", "__syncthreads();", [";"]),
    ("drop-sync", "if (a) shared.work.await(x);", ["if (a) ;"]),
    ("drop-sync", "while (!done(b)) {}", ["while (false) {}"]),
    ("drop-call", "ring.next();", [";"]),
    ("drop-call", "const int a = f();", []),
    ("drop-assignment", "l[i] *= rescale;", [";"]),
    ("drop-assignment", "++count;", [";"]),
    ("drop-assignment", "float l = rescale;", []),
    ("flip-phase", "f(ring.parity);", ["f(ring.parity ^ 1);"]),
    ("flip-phase", "f(count.kv_phase());", ["f(count.kv_phase() ^ 1);"]),
    ("wrong-stage", "f(q[k.stage]);", ["f(q[(k.stage ^ 1)]);"]),
    ("wait-for-fewer", "wgmma_wait<0>();", ["wgmma_wait<1>();"]),
    ("compare", "f(a < b);", ["f(a <= b);"]),
    ("compare", "f(a == b);", ["f(a != b);"]),
    ("bound", "f(i < n * 2);", ["f(i < n * 2 - 1);"]),
    ("bound", "f(i <= n);", ["f(i <= n + 1);"]),
    ("literal", "f(8, 1.0f);", ["f(9, 1.0f);", "f(8, 0.0f);"]),
    ("min-max", "f(min(a, b));", ["f(max(a, b));", "f((a));", "f((b));"]),
    ("arithmetic", "x += a - b;", ["x -= a - b;", "x += a + b;"]),
    ("drop-term", "f(a + b - c);", ["f(a - c);", "f(b - c);", "f(a + b);"]),
    ("drop-factor", "f(a * b + c);", ["f(a + c);", "f(b + c);"]),
    ("swap-operands", "f(a * 2 - b);", ["f(b - a * 2);"]),
    ("swap-arguments", "f(a.q, b.k, 1);", ["f(b.k, a.q, 1);"]),
    ("zero", "f(batch, x.head);", ["f(0, x.head);", "f(batch, 0);"]),
    ("drop-function", "f(logf(l));", ["f((l));"]),
    ("drop-minus", "f(-x);", ["f(x);"]),
    ("condition", "if (a) f();", ["if (false) f();", "if (true) f();"]),
    ("condition", "if constexpr (a) f();", ["if constexpr (false) f();"]),
    ("choice", "x = a ? b : c ? d : e;", [
        "x = b;", "x = c ? d : e;", "x = a ? b : d;", "x = a ? b : e;"]),
    ("logic", "f(a && b);", ["f(a || b);"]),
    ("drop-condition", "f(a && b);", ["f(a);", "f(b);"]),
    ("drop-negation", "f(!a);", ["f(a);"]),
    ("flip-bool", "step(Bool<true>{});", ["step(Bool<false>{});"]),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "text", "want"), RULES)
def test_mutants_of_a_rule(operator, text, want):
    assert changed(operator, text) == [texts(x) for x in want]


def test_every_operator_has_an_example_and_a_docstring():
    assert {x[0] for x in RULES} == set(operators.OPERATORS)
    assert all(x.__doc__ for x in operators.OPERATORS.values())


@pytest.mark.parametrize(
    "text",
    [
        "static_assert(a < b, c);",  # would not compile
        "using T = F<true>;",
        "__threadfence();",  # the emulator models none
        "#pragma unroll 4\n",
    ],
)
def test_text_that_no_rule_changes(text):
    source = Source("a.cu", f"void f() {{\n{text}\n}}")
    assert [*mutants.by_rules(source)] == []
