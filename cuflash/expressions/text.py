"""The CUDA text of recorded functions: ``score/expression.cuh``.

Two structs, `ScoreExpression` and `MaskExpression`. What all pairs of a head
share is computed in `set_head` and kept; the rest stands in functions of a
pair, where the compiler shares what only rows or columns differ in. The mask's
function takes intervals too, of a tile's queries and keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

from cuflash.expressions import derivative, nodes, ranges
from cuflash.expressions.nodes import SCORE, Node
from cuflash.expressions.reals import in_reals
from cuflash.expressions.trace import ArrayKind

MOST_AXES = 4  # of an array

_ELEMENTS = {
    "bool": "u8", "int8": "signed char", "uint8": "u8", "int16": "short",
    "uint16": "u16", "int32": "int", "uint32": "u32", "int64": "i64",
    "uint64": "u64", "float16": "float16", "bfloat16": "bfloat16",
    "float32": "float", "float64": "double",
}  # fmt: skip
DTYPES = tuple(_ELEMENTS)

# Functions with a fast variant for 16-bit elements.
_FAST = "exp", "exp2", "tanh"


@functools.lru_cache(maxsize=4096)
def text(
    score: Node | None,
    mask: Node | None,
    arrays: tuple[ArrayKind, ...] = (),
    dmods: tuple[int, ...] = (),
    short: bool = False,
) -> str:
    """The text for a score and a mask; of None, a struct that does nothing.

    Parameters
    ----------
    score, mask : Node or None
    arrays : tuple of ArrayKind
        By slot.
    dmods : tuple of int
        The slots of the arrays whose gradients are summed.
    short : bool
        Whether no sequence has more than `reals.SHORT` tokens.
    """
    if score is not None and short:
        score = in_reals(score)
    of_mask = mask.depends if mask else frozenset()
    return "\n".join([
        f"constexpr bool MASK_OF_BATCH = {_bool('b' in of_mask)};",
        f"constexpr bool MASK_OF_HEAD = {_bool('h' in of_mask)};",
        "",
        *_score_struct(score, arrays, dmods),
        "",
        *_mask_struct(mask, arrays),
        "",
    ])  # fmt: skip


def _bool(value: bool) -> str:
    return "true" if value else "false"


_HEAD = "const Arguments& args, int b, int h, int seqlen_q, int seqlen_k"
_SET_HEAD = f"    void set_head({_HEAD}) {{"


def _score_struct(
    score: Node | None, arrays: Sequence[ArrayKind], dmods: tuple[int, ...]
) -> list[str]:
    header = ["template <class Real> struct ScoreExpression {"]
    if score is None:
        return [
            *header,
            "    template <class Arguments>",
            "    void set_head(const Arguments&, int, int, int, int) {}",
            "    static constexpr bool READS = false;",
            "    bool reads_inside(int, int, int, int) const { return true; }",
            "    template <bool INSIDE = false>",
            "    Real score(Real x, int, int) const { return x; }",
            "    template <bool INSIDE = false>",
            "    Real score(Real x, int, int, Real& slope) const {",
            "        slope = 1;",
            "        return x;",
            "    }",
            "    void add_gradients(Real, Real, int, int) const {}",
            "};",
        ]
    slope = derivative.slope(score)
    scatters = derivative.of_gathers(score, dmods) if dmods else {}
    needed = [score, slope, *scatters, *scatters.values()]
    body = _Body(needed, arrays, exact=False, scatters=bool(scatters))
    pair = "(Real x, int query, int key"
    return [
        *header,
        *body.members,
        "    static constexpr bool FAST = sizeof(Element) == 2;",
        "",
        _SET_HEAD,
        *body.set_head,
        "    }",
        *body.reads_inside([score, slope]),
        f"    template <bool INSIDE = false> Real score{pair}) const {{",
        *body.lines([score]),
        f"        return {body.name(score)};",
        "    }",
        "    template <bool INSIDE = false>",
        f"    Real score{pair}, Real& slope) const {{",
        *body.lines([score, slope]),
        f"        slope = {body.name(slope)};",
        f"        return {body.name(score)};",
        "    }",
        "    void add_gradients(Real x, Real ds, int query, int key) const {",
        *body.not_inside([*scatters.values(), *_indices(scatters)]),
        *body.lines([*scatters.values(), *_indices(scatters)]),
        *(x for g, by in scatters.items() for x in body.scatter(g, by)),
        "    }",
        "};",
    ]


def _indices(gathers: Iterable[Node]) -> list[Node]:
    return [x for gather in gathers for x in gather.args]


def _mask_struct(mask: Node | None, arrays: Sequence[ArrayKind]) -> list[str]:
    ranges_ = (
        "        int first_query, int last_query, int first_key, int last_key)"
        " const {"
    )
    if mask is None:
        return [
            "struct MaskExpression {",
            "    template <class Arguments>",
            "    void set_head(const Arguments&, int, int, int, int) {}",
            "    bool visible(int, int) const { return true; }",
            "    template <bool WHOLE_WARP>",
            "    Visibility visibility(int, int, int, int) const {",
            "        return Visibility::ALL;",
            "    }",
            "};",
        ]
    body = _Body([mask], arrays, exact=True)
    return [
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
    """

    def __init__(
        self,
        roots: Sequence[Node],
        arrays: Sequence[ArrayKind],
        exact: bool,
        scatters: bool = False,
    ) -> None:
        self._arrays, self._exact = arrays, exact
        self._scatters = scatters
        every = nodes.in_order(roots)
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
        if gathers or self._scatters:
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
            return str(value) if ranges.fits_int32(node) else f"{value}LL"
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

    def lines(self, roots: Sequence[Node]) -> list[str]:
        """Lines that compute what differs among pairs."""
        found = []
        for node in nodes.in_order(roots):
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
        fused = self._fused(node)
        if fused:
            return fused
        fast = "<FAST>" if node.op in _FAST else ""
        return f"ex::{node.op}{fast}({', '.join(args)})"

    def _operand(self, node: Node, arg: Node) -> str:
        name = self.name(arg)
        widens = arg.kind == "int" and self._wide[node] and not self._wide[arg]
        if node.op == "where" and arg is node.args[0]:
            widens = False
        return f"ex::to<i64>({name})" if widens else name

    def _by_constant(self, node: Node, args: list[str]) -> str:
        value = node.args[1].value
        inverse = 1 / value if value else 0.0
        if self._exact or not math.isfinite(value) or not inverse:
            return f"ex::divide({', '.join(args)})"
        return (
            f"ex::divide_constant<FAST>({', '.join(args)},"
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
        if _is_product(second):
            a, b = map(self.name, second.args)
            return f"ex::multiply_add({minus}{a}, {b}, {self.name(first)})"
        if _is_product(first):
            a, b = map(self.name, first.args)
            return f"ex::multiply_add({a}, {b}, {minus}{self.name(second)})"
        return None

    # ---- Arrays ----

    def _gather(self, node: Node, kind: str) -> str:
        if node.of_head:
            how = "false"
        else:
            how = f"{'WHOLE_WARP' if self._exact else 'false'}, INSIDE"
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
        of_score = any("score" in x.depends for x in indices)
        if not gathers or of_score:
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

    def scatter(self, gather: Node, by: Node) -> list[str]:
        """dmod += f_a dS at the place that a gather reads."""
        slot = gather.value[0]
        axes = range(len(gather.args))
        sizes = [f"args->expression.sizes[{MOST_AXES * slot + x}]"
                 for x in axes]  # fmt: skip
        strides = [f"args->expression.dmod_strides[{MOST_AXES * slot + x}]"
                   for x in axes]  # fmt: skip
        indices = "".join(f", {self.name(x)}" for x in gather.args)
        return [
            "        ex::scatter(ex::Sums<Real, "
            f"{len(gather.args)}>{{static_cast<Real*>(args->dmods[{slot}]),",
            f"            {{{', '.join(sizes)}}}, {{{', '.join(strides)}}}}},",
            f"            ex::product_if(ds, {self.name(by)}){indices});",
        ]


def _is_product(node: Node) -> bool:
    """Whether a node is a product that is computed for each pair."""
    return node.op == "multiply" and not node.of_head


def _free(gather: Node) -> list[int]:
    """The axes of a gather that a pair's own indices choose from."""
    return [i for i, x in enumerate(gather.args) if not x.of_head]


def _view_key(gather: Node) -> tuple:
    """Gathers that share it share where their head's part begins."""
    fixed = ((i, x) for i, x in enumerate(gather.args) if x.of_head)
    return gather.value[0], *fixed


def _fixed(gathers: Iterable[Node]) -> list[Node]:
    return [x for gather in gathers for x in gather.args if x.of_head]
