"""The CUDA text of recorded functions: ``score/expression.cuh``.

Two structs, `ScoreExpression` and `MaskExpression`. What all pairs of a head
share is computed in `set_head` and kept; the rest stands in functions of a
pair, where the compiler shares what only rows or columns differ in. The mask's
function takes intervals too, of a tile's queries and keys.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cuflash.expressions import bounds, derivative, nodes, ranges
from cuflash.expressions.affine import Affine, affine
from cuflash.expressions.builtin import of_distance, shared_by
from cuflash.expressions.derivative import Differential
from cuflash.expressions.nodes import SCORE, Node
from cuflash.expressions.reals import in_reals
from cuflash.expressions.trace import ArrayKind

MOST_AXES = 4  # of an array
SMALL_SQUARE = 0.2  # request/softcap.py: POLY4_MOST

_ELEMENTS = {
    "bool": "u8", "int8": "signed char", "uint8": "u8", "int16": "short",
    "uint16": "u16", "int32": "int", "uint32": "u32", "int64": "i64",
    "uint64": "u64", "float16": "float16", "bfloat16": "bfloat16",
    "float32": "float", "float64": "double",
}  # fmt: skip
DTYPES = tuple(_ELEMENTS)

# Functions with a fast variant for 16-bit elements.
_FAST = "exp", "exp2", "tanh", "divide"


class Moves(NamedTuple):
    """How a call's scores move.

    Attributes
    ----------
    slots : tuple of int
        Of the arrays that move.
    twice : bool
        Whether second derivatives are needed, too.
    """

    slots: tuple[int, ...] = ()
    twice: bool = False


@functools.lru_cache(maxsize=4096)
def text(
    score: Node | None,
    mask: Node | None,
    arrays: tuple[ArrayKind, ...] = (),
    dmods: tuple[int, ...] = (),
    short: bool = False,
    exact_sums: bool = False,
    moves: Moves | None = None,
    apart: bool = False,
) -> str:
    """The text for a score and a mask; of None, the file of calls without.

    Parameters
    ----------
    score, mask : Node or None
    arrays : tuple of ArrayKind
        By slot.
    dmods : tuple of int
        The slots of the arrays whose gradients are summed.
    short : bool
        Whether no sequence has more than `reals.SHORT` tokens.
    exact_sums : bool
        Whether gradients are summed exactly (score/exact_sums.cuh).
    moves : Moves or None
        Of derivatives along directions.
    apart : bool
        Whether each pair's gradients are added alone, as a lane's pairs are
        no grid of queries and keys.
    """
    if score is not None and short:
        score = in_reals(score)
    return "\n".join([
        *(
            ['#include "score/no_score_mod.cuh"'] if score is None
            else _score_struct(
                score, arrays, dmods, exact_sums, short, moves, apart)
        ),
        "",
        *(
            ['#include "score/no_mask_mod.cuh"'] if mask is None
            else _mask_struct(mask, arrays)
        ),
        "",
    ])  # fmt: skip


def _bool(value: object) -> str:
    return "true" if value else "false"


_HEAD = "const Arguments& args, int b, int h, int seqlen_q, int seqlen_k"
_SET_HEAD = f"    void set_head({_HEAD}) {{"


_PAIRS = "template <class Pairs>"
_SUMS = "(Gradients<Pairs>& sums, const Pairs& pairs"


def _score_struct(
    score: Node,
    arrays: Sequence[ArrayKind],
    dmods: tuple[int, ...],
    exact_sums: bool,
    short: bool,
    moves: Moves | None,
    apart: bool,
) -> list[str]:
    header = ["template <class Real> struct ScoreExpression {"]
    parts = affine(score) if short else None
    slope = derivative.slope(score)
    scatters = derivative.of_gathers(score, dmods) if dmods else {}
    needed = [score, slope, *scatters, *scatters.values()]
    motion = _Motion.of(score, scatters, moves) if moves else None
    if motion:
        needed += motion.roots
    if parts:
        needed += [parts.added, parts.step, *parts.edges]
    shared = of_distance((score, slope))
    body = _Body(
        needed, arrays, exact=False, shared=shared,
        args=bool(scatters or moves and moves.slots),
    )  # fmt: skip
    gradients = [
        _Gradient(f"sums.{body.name(g)}", g, by, exact_sums, apart)
        for g, by in scatters.items()
    ]
    added = [
        node for x in gradients
        for node in (x.by, *(() if x.sums else x.gather.args))
    ]  # fmt: skip
    adds = [*body.not_inside(added), *body.lines(added)]
    adds = _of_argument(
        [*adds, *(line for x in gradients for line in body.add(x))]
    )
    return [
        *header,
        *body.members,
        "    static constexpr bool FAST = sizeof(Element) == 2;",
        f"    static constexpr float SMALL_SQUARES = {_small(needed)!r}f;",
        "",
        _SET_HEAD,
        *body.set_head,
        "    }",
        *body.reads_inside([score, slope]),
        *(body.affine(parts) if parts else _NOT_AFFINE),
        *body.of_distance(),
        *_score_functions(body, score, slope, motion),
        f"    {_PAIRS} struct Gradients {{",
        *(
            f"        ex::{x.sums}<Real, Pairs> {body.name(x.gather)};"
            for x in gradients
            if x.sums
        ),
        "    };",
        f"    {_PAIRS}",
        f"    void add_gradients{_SUMS}, int i, int j, Real x, Real ds) const"
        " {",
        *_indices_of_pair(adds),
        *(
            []
            if any(x.sums for x in gradients)
            else ["        if (ds == Real(0)) return;"]
        ),
        *adds,
        "    }",
        f"    {_PAIRS}",
        f"    void finish_gradients{_SUMS}) const {{",
        *(line for x in gradients for line in body.finish(x)),
        "    }",
        *(motion.lines(body, gradients) if motion else ()),
        "};",
    ]


def _of_argument(lines: list[str]) -> list[str]:
    """Lines of a function of x, with the s, scale and SMALL that some name."""
    if any("SMALL" in x for x in lines):
        lines = ["        constexpr bool SMALL = false;", *lines]
    if any(re.search(r"\bscale\b", x) for x in lines):
        return ["        const Real s = x, scale = 1;", *lines]
    return lines


_MOVED = "(Real x, Real w, int query, int key, int direction) const {"


class _Motion(NamedTuple):
    """What a struct says of directions: `derivative.Differential`.

    Attributes
    ----------
    of_score, of_slope : Differential
        Of f and, for second derivatives, of f_s.
    of_scatters : dict of Node to Differential
        Of the f_a of each gather whose array has a second gradient.
    """

    of_score: Differential
    of_slope: Differential | None
    of_scatters: dict[Node, Differential]

    @classmethod
    def of(
        cls, score: Node, scatters: dict[Node, Node], moves: Moves
    ) -> _Motion:
        def moved(root: Node) -> Differential:
            return derivative.differential(root, moves.slots)

        if not moves.twice:
            return cls(moved(score), None, {})
        of_scatters = {x: moved(y) for x, y in scatters.items()}
        slope = derivative.slope(score)
        return cls(moved(score), moved(slope), of_scatters)

    @property
    def roots(self) -> list[Node]:
        known = [self.of_score, *self.of_scatters.values()]
        known += [self.of_slope] if self.of_slope else []
        gathers = (y for x in known for y in x.by_gathers)
        return [*(y for x in known for y in x.roots), *gathers]

    def lines(self, body: _Body, gradients: list[_Gradient]) -> list[str]:
        arrays = self.of_score._replace(by_score=nodes.constant(0.0))
        found = body.differential("of_arrays", arrays)
        if self.of_slope is None:
            return found
        bends = _bool(not self.of_slope.is_zero)
        found += [
            f"    static constexpr bool CURVED = {bends};",
            *body.differential("slope_dot", self.of_slope),
        ]
        if not gradients:
            return found
        terms = []
        for x in gradients:
            moved = body.terms(self.of_scatters[x.gather])
            of_t = f"ex::product_if(t, {body.name(x.by)})"
            term = f"{of_t} + ex::product_if(ds, {moved})"
            terms += body.add(x, of_t if moved == body.ZERO else term)
        needed = [y for x in self.of_scatters.values() for y in x.roots]
        for x in gradients:
            needed += [x.by, *(() if x.sums else x.gather.args)]
        lines = [*body.not_inside(needed), *body.lines(needed), *terms]
        direction = "        constexpr int direction = 0;"
        return [
            *found,
            f"    {_PAIRS}",
            f"    void add_second_gradients{_SUMS}, int i, int j, Real x,"
            " Real w, Real t, Real ds) const {",
            *([direction] if any("direction" in x for x in terms) else []),
            *_indices_of_pair(lines),
            *_of_argument(lines),
            "    }",
        ]


def _small(roots: Sequence[Node]) -> float:
    """SMALL_SQUARES: the largest square of a score that SMALL may be said of.

    0 if no tanh is that of a score by a constant.
    """
    caps = [_cap_of(x) for x in nodes.in_order(roots)]
    return min((SMALL_SQUARE * x * x for x in caps if x), default=0.0)


_NOT_AFFINE = ("    static constexpr bool AFFINE = false;",)


_PAIR = "Real s, Real scale, int query, int key"


def _score_functions(
    body: _Body, score: Node, slope: Node, motion: _Motion | None
) -> list[str]:
    """f, and f with its derivatives; of what pairs of a distance share too.

    The second derivative is that of calls of second derivatives.
    """
    found: list[str] = []
    each = [{"": score}, {"": score, "slope": slope}]
    if motion and motion.of_slope:
        each.append(each[1] | {"bend": motion.of_slope.by_score})
    for results in each:
        roots = [*results.values()]
        by = "".join(f", Real& {x}" for x in results if x)
        given = ", const OfDistance& shared" if body.shared else ""
        found += [
            "    template <bool INSIDE = false, bool SMALL = false>",
            f"    Real score({_PAIR}{by}{given}) const {{",
            *_with_score([
                *body.lines(roots, body.shared),
                *(f"        {x} = {body.name(y)};"
                  for x, y in results.items() if x),
                f"        return {body.name(score)};",
            ]),
            "    }",
        ]  # fmt: skip
        if given:
            passed = "".join(f", {x}" for x in results if x)
            passed = "s, scale, query, key" + passed
            found += [
                "    template <bool INSIDE = false, bool SMALL = false>",
                f"    Real score({_PAIR}{by}) const {{",
                f"        return score<INSIDE, SMALL>({passed},"
                " of_distance<INSIDE>(query, key));",
                "    }",
            ]
    return found


def _with_score(lines: list[str]) -> list[str]:
    """Lines after that of x, the score that comes in, if one names it."""
    if not any(re.search(r"\bx\b", x) for x in lines):
        return lines
    return ["        const Real x = ex::multiply(s, scale);", *lines]


def _indices_of_pair(lines: list[str]) -> list[str]:
    """Those of query i and key j of `pairs` that lines use."""
    return [
        f"        const int {x} = pairs.{x} + Pairs::{axis}::offset({i});"
        for x, axis, i in (("query", "Queries", "i"), ("key", "Keys", "j"))
        if re.search(rf"\b{x}\b", "\n".join(lines))
    ]


# How the pairs that share an element are summed first, by what its indices
# depend on: score/array_gradients.cuh.
_KINDS = {
    "all": "HeadSum", "q_idx": "QuerySums", "kv_idx": "KeySums",
    "distance": "DistanceSums",
}  # fmt: skip


class _Gradient:
    """The gradient of an array by what one gather reads.

    Attributes
    ----------
    name : str
        The sums of a lane's pairs.
    gather, by : Node
        And f_a, the score's derivative by it.
    sums : str or None
        Their type; None if pairs do not share elements.
    by_warp : bool
        Whether all lanes may add to one element, though sums are of many.
    target : str
        The type of the sums in global memory.
    """

    def __init__(
        self, name: str, gather: Node, by: Node, exact_sums: bool, apart: bool
    ) -> None:
        self.name, self.gather, self.by = name, gather, by
        shared = None if apart else shared_by(gather)
        self.sums = _KINDS[shared] if shared else None
        self.by_warp = shared == "distance"
        self.target = "ExactSums" if exact_sums else "FloatSums"


def _mask_struct(mask: Node, arrays: Sequence[ArrayKind]) -> list[str]:
    ranges_ = (
        "        int first_query, int last_query, int first_key, int last_key)"
        " const {"
    )
    body = _Body([mask], arrays, exact=True)
    return [
        f"constexpr bool MASK_OF_BATCH = {_bool('b' in mask.depends)};",
        f"constexpr bool MASK_OF_HEAD = {_bool('h' in mask.depends)};",
        "",
        "struct MaskExpression {",
        "    using Real = Accumulator<Element>;",
        *body.members,
        "    static constexpr bool FAST = false;",
        "",
        _SET_HEAD,
        *body.set_head,
        "    }",
        *body.reads_inside([mask]),
        "    template <bool WHOLE_WARP, bool INSIDE, class Query, class Key>",
        "    auto of(Query query, Key key) const {",
        *body.lines([mask]),
        f"        return {body.name(mask)};",
        "    }",
        "    template <bool INSIDE = false>",
        "    bool visible(int query, int key) const {",
        "        return of<false, INSIDE>(query, key);",
        "    }",
        "    template <bool WHOLE_WARP> Visibility visibility(",
        ranges_,
        "        const ex::Truth found = ex::truth(of<WHOLE_WARP, false>(",
        "            ex::Interval<int>{first_query, last_query},",
        "            ex::Interval<int>{first_key, last_key}));",
        "        if (!found.may_be_true) return Visibility::NONE;",
        "        return found.may_be_false ? Visibility::PARTLY"
        " : Visibility::ALL;",
        "    }",
        "};",
    ]


class _Body:
    """Names and lines of a struct's nodes.

    Attributes
    ----------
    members : list of str
        Declarations of what is kept for a head.
    set_head : list of str
        Lines that compute it.
    shared : sequence of Node
        What pairs of one distance share.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        arrays: Sequence[ArrayKind],
        exact: bool,
        args: bool = False,
        shared: Sequence[Node] = (),
    ) -> None:
        self._arrays, self._exact, self.shared = arrays, exact, shared
        every = nodes.in_order(roots)
        self._exact_quotients = _before_steps(every)
        self._names = {x: f"n{i}" for i, x in enumerate(every)}
        self._wide = {x: ranges.is_wide(x) for x in every}
        pairs = [x for x in every if not x.of_head]
        kept = dict.fromkeys(
            x
            for node in (*pairs, *(y for y in roots if y.of_head))
            for x in (node, *node.args)
            if x.of_head and not x.is_constant
        )
        self.members = [f"    {self._type(x)} {self._names[x]};" for x in kept]
        gathers = [x for x in pairs if x.op == "gather"]
        self.set_head: list[str] = []
        self._views: dict[tuple, str] = {}
        for node in nodes.in_order([*kept, *_fixed(gathers)]):
            if not node.is_constant:
                declared = "" if node in kept else "const auto "
                self.set_head.append(
                    f"        {declared}{self._names[node]} ="
                    f" {self._value(node)};"
                )
        if gathers or args:
            self.members.append("    const Arguments* args = nullptr;")
            self.set_head.insert(0, "        this->args = &args;")
        for gather in gathers:
            self._keep_view(gather)

    # ---- Names and types ----

    def name(self, node: Node) -> str:
        """What an operand is called: a constant is its own name."""
        if node.is_constant:
            return self._literal(node)
        if node is SCORE:
            return "x"
        if node.op == "index" and node.value in ("q_idx", "kv_idx"):
            return "query" if node.value == "q_idx" else "key"
        return self._names[node]

    def _literal(self, node: Node) -> str:
        value = node.value
        if node.kind == "bool":
            return _bool(value)
        if node.kind == "int":
            if ranges.fits_int32(node):
                return str(value)
            # 2^63 alone is no literal.
            return f"({value + 1}LL - 1)" if value < 0 else f"{value}LL"
        if math.isfinite(value):
            return f"Real({float(value).hex()})"
        if math.isnan(value):
            return "(ex::infinite<Real>() - ex::infinite<Real>())"
        return f"{'-' if value < 0 else ''}ex::infinite<Real>()"

    def _type(self, node: Node) -> str:
        if node.kind == "int":
            return "i64" if self._wide[node] else "int"
        return {"bool": "bool", "real": "Real"}[node.kind]

    # ---- Values ----

    def lines(
        self, roots: Sequence[Node], given: Sequence[Node] = ()
    ) -> list[str]:
        """Lines that compute what differs among pairs.

        given : those of `shared` that are passed.
        """
        found = [
            f"        const auto {self._names[x]} = shared.{self._names[x]};"
            for x in given
        ]
        wanted = [x for x in roots if x not in given]
        for node in nodes.in_order(wanted, given):
            leaf = node is SCORE or node.op == "index"
            if not (node.of_head or leaf):
                found.append(
                    f"        const auto {self._names[node]} ="
                    f" {self._value(node)};"
                )
        return found

    def _value(self, node: Node) -> str:
        kind = self._type(node)
        if node.op == "index":
            return str(node.value)
        if node.op == "number":
            return f"ex::number<{kind}>(args.mod_numbers[{node.value}])"
        if node.op == "size":
            slot, axis = node.value
            place = MOST_AXES * slot + axis
            return f"args.expression.sizes[{place}]"
        if node.op == "gather":
            return self._gather(node, kind)
        args = [self._operand(node, x) for x in node.args]
        if (
            node.op == "to_real"
            or node.op == "to_int"
            and (node.args[0].kind != "real")
        ):
            return f"ex::to<{kind}>({args[0]})"
        if node.op == "divide" and node.args[1].is_constant:
            return self._by_constant(node, args)
        special = self._fused(node) or self._of_special(node)
        if special:
            return special
        fast = self._fast(node) if node.op in _FAST else ""
        return f"ex::{node.op}{fast}({', '.join(args)})"

    def _of_special(self, node: Node) -> str | None:
        """A quotient of a pair, or tanh of a score by a constant."""
        if self._exact or node.of_head:
            return None
        fast = self._fast(node)[:-1]
        args = ", ".join(self.name(x) for x in node.args)
        if node.op == "divide" and node not in self._exact_quotients:
            divisor = node.args[1]
            kind = (
                "MODERATE" if bounds.is_moderate(divisor)
                else "FAR" if bounds.is_far_from_zero(divisor) else "ANY"
            )  # fmt: skip
            return f"ex::divide{fast}, ex::{kind}>({args})"
        by = _cap_of(node)
        if by:
            factor = self._literal(nodes.constant(1 / by))
            return f"ex::tanh_of{fast}, SMALL>({args}, x, {factor})"
        return None

    def _fast(self, node: Node) -> str:
        return "<false>" if node in self._exact_quotients else "<FAST>"

    def _operand(self, node: Node, arg: Node) -> str:
        name = self.name(arg)
        widens = arg.kind == "int" and self._wide[node] and not self._wide[arg]
        if node.op == "where" and arg is node.args[0]:
            widens = False
        return f"ex::to<i64>({name})" if widens else name

    def _by_constant(self, node: Node, args: list[str]) -> str:
        value = node.args[1].value
        # Beyond, the inverse or the value is no normal float32.
        if self._exact or not 2.0**-126 <= abs(value) <= 2.0**126:
            return f"ex::divide<false>({', '.join(args)})"
        inverse = 1 / value
        return (
            f"ex::divide_constant{self._fast(node)}({', '.join(args)},"
            f" Real({inverse.hex()}))"
        )

    def _fused(self, node: Node) -> str | None:
        """a b + c of a score is rounded once, and so are its differences."""
        if self._exact or node.kind != "real":
            return None
        if node.op not in ("add", "subtract"):
            return None
        first, second = node.args
        minus = "-" * (node.op == "subtract")
        if first is SCORE and "score" not in second.depends:
            return f"ex::multiply_add(s, scale, {minus}{self.name(second)})"
        if second is SCORE and "score" not in first.depends:
            return f"ex::multiply_add({minus}s, scale, {self.name(first)})"
        if self._is_product(second):
            a, b = map(self.name, second.args)
            return f"ex::multiply_add({minus}{a}, {b}, {self.name(first)})"
        if self._is_product(first):
            a, b = map(self.name, first.args)
            return f"ex::multiply_add({a}, {b}, {minus}{self.name(second)})"
        return None

    def _is_product(self, node: Node) -> bool:
        """Whether a node is a product that is computed for each pair."""
        shared = node in self.shared
        return node.op == "multiply" and not (node.of_head or shared)

    # ---- Arrays ----

    def _gather(self, node: Node, kind: str) -> str:
        if node.of_head:
            how = "false"
        else:
            how = f"{'WHOLE_WARP' if self._exact else 'false'}, INSIDE"
            if self._exact and "kv_idx" in node.depends:
                how += ", true"
        free = _free(node) if not node.of_head else [*range(len(node.args))]
        indices = "".join(f", {self.name(node.args[x])}" for x in free)
        return f"ex::gather<{kind}, {how}>({self._view(node)}{indices})"

    def not_inside(self, roots: Sequence[Node]) -> list[str]:
        """The constant for reads in functions that do not test ranges."""
        if all(x.of_head for x in nodes.gathers(roots)):
            return []
        names = ["WHOLE_WARP"] * self._exact + ["INSIDE"]
        return [f"        constexpr bool {x} = false;" for x in names]

    def reads_inside(self, roots: Sequence[Node]) -> list[str]:
        """Whether all reads of a tile's pairs are inside the arrays.

        The tests of each index are then left out: `INSIDE`.
        """
        gathers = [x for x in nodes.gathers(roots) if not x.of_head]
        indices = dict.fromkeys(
            y for x in gathers for y in x.args if not y.of_head
        )
        # Of ints alone: reals of a pair may be rounded together, those of an
        # interval are not.
        of_reals = any(
            x.kind == "real" and not x.of_head for x in nodes.in_order(indices)
        )
        if not gathers or of_reals:
            value = "true" if not gathers else "false"
            return [
                "    static constexpr bool READS = false;",
                "    bool reads_inside(int, int, int, int) const {",
                f"        return {value};",
                "    }",
            ]
        tests = [
            f"ex::holds({self._view(x)}.size[{axis}], {self.name(x.args[i])})"
            for x in gathers
            for axis, i in enumerate(_free(x))
        ]
        return [
            "    static constexpr bool READS = true;",
            "    bool reads_inside(",
            "        int first_query, int last_query, int first_key, int"
            " last_key) const {",
            *self.not_inside([*indices]),
            "        const ex::Interval<int> query{first_query, last_query};",
            "        const ex::Interval<int> key{first_key, last_key};",
            *self.lines([*indices]),
            "        return " + "\n            && ".join(tests) + ";",
            "    }",
        ]

    def of_distance(self) -> list[str]:
        """The struct of what pairs of one distance share, and its values."""
        shares = f"    static constexpr bool SHARES = {_bool(self.shared)};"
        if not self.shared:
            return [shares]
        names = [self._names[x] for x in self.shared]
        return [
            shares,
            "    struct OfDistance {",
            *(
                f"        {self._type(x)} {name};"
                for x, name in zip(self.shared, names, strict=True)
            ),
            "    };",
            "    template <bool INSIDE = false>",
            "    OfDistance of_distance(int query, int key) const {",
            *self.lines(self.shared),
            f"        return {{{', '.join(names)}}};",
            "    }",
        ]

    def affine(self, parts: Affine) -> list[str]:
        """What is added to the score, and its derivative by the key."""
        edges = [*parts.edges] or [nodes.constant(1.0)]
        pair = "(int query, int key) const {"
        return [
            "    static constexpr bool AFFINE = true;",
            f"    static constexpr int EDGES = {len(edges)};",
            "    void edges(Real (&values)[EDGES], int query, int key) const"
            " {",
            *self.lines(edges),
            *(
                f"        values[{i}] = {self.name(x)};"
                for i, x in enumerate(edges)
            ),
            "    }",
            *(
                line
                for name, x in (("added", parts.added), ("step", parts.step))
                for line in (
                    f"    Real {name}{pair}",
                    *self.lines([x]),
                    f"        return {self.name(x)};",
                    "    }",
                )
            ),
        ]

    def _element(self, node: Node) -> str:
        return _ELEMENTS[node.value[1]]

    def _view(self, node: Node) -> str:
        """The array with the axes that a pair's indices choose from."""
        slot = node.value[0]
        element = self._element(node)
        free = [*range(len(node.args))] if node.of_head else _free(node)
        args = "args." if node.of_head else "args->"
        data = f"static_cast<const {element}*>({args}mod_arrays[{slot}])"
        sizes = [
            f"{args}expression.sizes[{MOST_AXES * slot + x}]" for x in free
        ]
        if not node.of_head and len(free) < len(node.args):
            name = self._views[_view_key(node)]
            data, sizes[0] = f"{name}_data", f"{name}_size"
        strides = [self._stride(args, slot, x) for x in free]
        if not free:  # an array without axes
            return f"ex::ModArray<{element}, 1>{{{data}, {{1}}, {{1}}}}"
        return (
            f"ex::ModArray<{element}, {len(free)}>{{{data},"
            f" {{{', '.join(sizes)}}}, {{{', '.join(strides)}}}}}"
        )

    def _stride(self, args: str, slot: int, axis: int) -> str:
        if axis in self._arrays[slot].unit:
            return "1"
        return f"{args}expression.strides[{MOST_AXES * slot + axis}]"

    def _keep_view(self, node: Node) -> None:
        """Of an array that the head has fixed axes of: where those lead.

        If they lead outside, no element is left.
        """
        slot, free = node.value[0], _free(node)
        fixed = [x for x in range(len(node.args)) if x not in free]
        if not fixed or _view_key(node) in self._views:
            return
        self._views[_view_key(node)] = self._names[node]
        name, element = self._names[node], self._element(node)
        sizes = [f"args.expression.sizes[{MOST_AXES * slot + x}]"
                 for x in fixed]  # fmt: skip
        strides = [self._stride("args.", slot, x) for x in fixed]
        indices = ", ".join(self.name(node.args[x]) for x in fixed)
        self.members += [
            f"    const {element}* {name}_data;",
            f"    int {name}_size;",
        ]
        first = MOST_AXES * slot + free[0]
        self.set_head += [
            f"        const ex::Place {name}_place = ex::place(",
            f"            ex::ModArray<{element}, {len(fixed)}>{{",
            f"                nullptr, {{{', '.join(sizes)}}},"
            f" {{{', '.join(strides)}}}}},",
            f"            {indices});",
            f"        {name}_data = static_cast<const {element}*>("
            f"args.mod_arrays[{slot}])",
            f"            + ({name}_place.inside ? {name}_place.offset : 0);",
            f"        {name}_size = {name}_place.inside ?"
            f" args.expression.sizes[{first}] : 0;",
        ]

    # ---- Directions ----

    ZERO = "Real(0)"

    def terms(self, moved: Differential) -> str:
        """The sum of a differential, whose nodes have been computed."""
        terms = []
        if not nodes.same_constant(moved.by_score, 0):
            terms.append(f"ex::product_if({self.name(moved.by_score)}, w)")
        for gather, by in moved.by_gathers.items():
            dot = self._tangent_of(gather)
            one = nodes.same_constant(by, 1)
            terms.append(
                dot if one else f"ex::product_if({self.name(by)}, {dot})"
            )
        return " + ".join(terms) or self.ZERO

    def differential(self, name: str, moved: Differential) -> list[str]:
        """A function of x, W_X and a pair that computes it."""
        lines = [*self.not_inside(moved.roots), *self.lines(moved.roots)]
        lines.append(f"        return {self.terms(moved)};")
        return [f"    Real {name}{_MOVED}", *_of_argument(lines), "    }"]

    def _tangent_of(self, gather: Node) -> str:
        """What a gather reads, of the array's tangent."""
        slot, element = gather.value[0], self._element(gather)
        axes = [MOST_AXES * slot + x for x in range(len(gather.args))]
        numbers = "args->mod_tangents"
        data = (
            f"static_cast<const {element}*>(args->mod_dots[{slot}])"
            f" + direction * {numbers}.directions[{slot}]"
        )
        sizes = ", ".join(f"args->expression.sizes[{x}]" for x in axes)
        strides = ", ".join(f"{numbers}.strides[{x}]" for x in axes)
        view = (
            f"ex::ModArray<{element}, {len(axes)}>{{{data}, {{{sizes}}},"
            f" {{{strides}}}}}"
        )
        indices = "".join(f", {self.name(x)}" for x in gather.args)
        return f"ex::gather<Real, false>({view}{indices})"

    def add(self, gradient: _Gradient, term: str = "") -> list[str]:
        """f_a dS of a pair, to its lane's sums or to global memory."""
        term = term or f"ex::product_if(ds, {self.name(gradient.by)})"
        if gradient.sums:
            return [f"        {gradient.name}.add(i, j, {term});"]
        return self._scatter(gradient, "scatter", term)

    def finish(self, gradient: _Gradient) -> list[str]:
        """A lane's sums, to global memory."""
        if not gradient.sums:
            return []
        scatter = "scatter_by_warp" if gradient.by_warp else "scatter"
        return [
            f"        {gradient.name}.finish(pairs, [&](Real sum, int query,"
            " int key) {",
            *self.not_inside(gradient.gather.args),
            *self.lines(gradient.gather.args),
            *self._scatter(gradient, scatter, "sum"),
            "        });",
        ]

    def _scatter(
        self, gradient: _Gradient, function: str, term: str
    ) -> list[str]:
        gather = gradient.gather
        indices = [self.name(x) for x in gather.args] or ["0"]
        slot, axes = gather.value[0], range(len(indices))
        sizes = [f"args->expression.sizes[{MOST_AXES * slot + x}]"
                 for x in axes]  # fmt: skip
        strides = [f"args->expression.dmod_strides[{MOST_AXES * slot + x}]"
                   for x in axes]  # fmt: skip
        target = f"ex::{gradient.target}<Real>"
        return [
            f"        ex::{function}(ex::ArrayGradient<{target},"
            f" {len(indices)}>{{",
            f"            {target}::of(*args, {slot}),",
            f"            {{{', '.join(sizes)}}}, {{{', '.join(strides)}}}}},",
            f"            {term}, {', '.join(indices)});",
        ]


# Their results jump where their operands do not.
_STEPS = frozenset((
    "floor", "ceil", "trunc", "rint", "to_int", "sign", "floor_divide",
    "remainder", "less", "less_equal", "greater", "greater_equal", "equal",
    "not_equal",
))  # fmt: skip
# Defined on a part of the reals, or telling what is: 1 - 1 has a square root,
# 1 - (1 + 2^-23) has none.
_DOMAINS = frozenset((
    "sqrt", "log", "log2", "log10", "log1p", "power", "isnan", "isinf",
))  # fmt: skip


def _cap_of(node: Node) -> float | None:
    """c of ``tanh(score / c)``."""
    if node.op != "tanh" or node.args[0].op != "divide":
        return None
    x, by = node.args[0].args
    known = x is SCORE and by.is_constant
    # Beyond, powers of the inverse are no normal numbers.
    return by.value if known and 1e-4 <= abs(by.value) <= 1e4 else None


def _before_steps(order: Sequence[Node]) -> set[Node]:
    """The nodes whose last bit may decide what a value is.

    Where a step is, as of an index, or whether there is a value. Of those of
    a score it may decide a step: a score is rounded before.
    """
    steps = {x for x in _before(order, _STEPS) if "score" not in x.depends}
    return steps | _before(order, _DOMAINS)


def _before(order: Sequence[Node], ops: frozenset[str]) -> set[Node]:
    """What the operations' operands are computed of."""
    found: set[Node] = set()
    for node in reversed(order):
        if node in found or node.op in ops:
            found.update(node.args)
    return found


def _free(gather: Node) -> list[int]:
    """The axes of a gather that a pair's own indices choose from."""
    return [i for i, x in enumerate(gather.args) if not x.of_head]


def _view_key(gather: Node) -> tuple:
    """Gathers that share it share where their head's part begins."""
    fixed = ((i, x) for i, x in enumerate(gather.args) if x.of_head)
    return gather.value[0], *fixed


def _fixed(gathers: Iterable[Node]) -> list[Node]:
    return [x for gather in gathers for x in gather.args if x.of_head]
