"""Runs checked calls: from a `Call` to launches, for any array library.

A call's signature determines its `Recipe`, which is cached: the plan, the
inputs to copy, every constant of the argument struct. A repeated call only
fills in its addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash import settings
from cuflash.backends.base import Backend, Target
from cuflash.launch.structs import (
    BackwardArguments,
    BackwardOptionsArguments,
    BackwardPlainArguments,
    BackwardWgmmaArguments,
    BackwardWgmmaOptionsArguments,
    ForwardArguments,
    ForwardOptionsArguments,
    ForwardSplitArguments,
    ForwardSplitOptionsArguments,
    ForwardWgmmaArguments,
    ForwardWgmmaOptionsArguments,
    MergeArguments,
    MergeManyArguments,
    RotaryArguments,
    Template,
    pointers_of,
)
from cuflash.plans import workspace
from cuflash.plans.plan import FamilyName, Plan, plan
from cuflash.request import layouts, options
from cuflash.request.layouts import Boxes
from cuflash.request.problem import (
    FEW_STATES,
    MOST_STATES,
    Call,
    Layout,
    Problem,
    Rotary,
    Signature,
)


@dataclass(frozen=True, eq=False)
class Recipe:
    """All decisions about the calls of one signature.

    Attributes
    ----------
    decided : Plan
    loaded
        The plan's kernels, as the backend launches them.
    template : Template
        The kernels' argument struct, without addresses.
    inputs : tuple of str
        The arrays that kernels read, in the struct's order.
    copies : mapping of str to Layout
        The arrays that kernels cannot access in place, and the layouts of
        their copies.
    boxes : tuple of (int, Boxes)
        The indices of the pointers that have a TensorMap too.
    workspace : tuple of int
        Bytes of the plan's buffers, in the struct's order.
    options : tuple of str
        The array options, in the struct's order, where they come first;
        then come the seed and the first buffers of `workspace`. A pointer
        is null if the call lacks the option. Empty for a call without
        options, whose struct has none of these fields.
    buffers_before_inputs : int
        How many buffers of `workspace` come before the inputs.
    last_input : str
        An array whose pointer is the struct's last, null if the call lacks
        it; empty if the struct has none.
    """

    decided: Plan
    loaded: Any
    template: Template
    inputs: tuple[str, ...]
    copies: Mapping[str, Layout]
    boxes: tuple[tuple[int, Boxes], ...] = ()
    workspace: tuple[int, ...] = ()
    options: tuple[str, ...] = ()
    buffers_before_inputs: int = 0
    last_input: str = ""


remembered = functools.lru_cache(maxsize=4096)

_GRADIENTS = ("dq", "dk", "dv")
_BACKWARD_POINTERS = pointers_of(BackwardArguments)


def decide(p: Problem, target: Target, family: FamilyName | None) -> Plan:
    """The plan for a problem on a target; logged the first time."""
    decided = plan(p, target.device(), family)
    _log(decided, target)
    return decided


@remembered
def _log(decided: Plan, target: Target) -> None:
    settings.logger().info("%s", decided)


class LaunchedForward:
    """A forward call without its data: new results, one launch.

    Nothing is left to look up, which takes as long as the rest of a call.
    """

    def __init__(self, signature: Signature, recipe: Recipe) -> None:
        p = signature.problem
        self.recipe = recipe
        self.kind = recipe.template.kind
        self.out = out_shape_of(p), signature.layouts["q"].dtype
        lse = lse_shape_of(p), p.lse_dtype
        self.lse = lse if signature.return_lse else ()

    def run(
        self, inputs: tuple[Any, Any, Any], backend: Backend
    ) -> tuple[Any, Any]:
        """out in full rank and, if wanted, lse; of q, k and v."""
        recipe = self.recipe
        with backend.current():
            out = backend.empty(*self.out)
            lse = backend.empty(*self.lse) if self.lse else None
            addresses = (
                *backend.address(inputs),
                *backend.address((out, lse), written=True),
            )
            arguments = _arguments(recipe, backend.tensor_map, addresses)
            backend.launch(recipe.loaded, arguments, self.kind)
        return out, lse


# ---- The calls ----


@remembered
def launched_forward(
    signature: Signature, target: Target, family: FamilyName | None
) -> LaunchedForward | None:
    """A signature's forward call, None if it is more than a launch."""
    if "out" in signature.layouts or 0 in lse_shape_of(signature.problem):
        return None
    recipe = _forward_recipe(signature, target, family)
    if recipe.copies or recipe.workspace or recipe.options:
        return None
    return LaunchedForward(signature, recipe)


def forward(call: Call, backend: Backend) -> tuple[Any, Any]:
    """Run a forward call: out in full rank and, if wanted, lse."""
    signature, target = call.signature, backend.target
    launched = launched_forward(signature, target, target.family)
    if launched is not None:
        given = call.given
        return launched.run((given["q"], given["k"], given["v"]), backend)
    p, out, lse = signature.problem, call.out, None
    lse_shape = lse_shape_of(p)
    with backend.current():
        if out is None:
            dtype = signature.layouts["q"].dtype
            out = backend.empty(out_shape_of(p), dtype)
        if signature.return_lse:
            lse = backend.empty(lse_shape, p.lse_dtype)
        if 0 in lse_shape:
            return out, lse
        recipe = _forward_recipe(signature, target, target.family)
        written = out
        if recipe.copies:
            written = new_or_same(recipe.copies.get("out"), out, backend)
        _launch(recipe, call, backend, (written, lse))
        if written is not out:
            backend.copy(out, written)
    return out, lse


def backward(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a backward call: dq, dk, dv in full rank; dbias, dsink if wanted."""
    signature = call.signature
    p, shapes = signature.problem, gradient_shapes_of(signature.problem)
    with backend.current():
        has_pairs = 0 not in shapes[0] and 0 not in shapes[1]
        new = backend.empty if has_pairs else backend.zeros
        gradients = _gradients(call, shapes, new)
        dbias = dsink = None
        if p.return_dbias:  # zeros: kernels add to it
            dbias = backend.zeros(call.options["bias"].shape, p.lse_dtype)
        if p.return_dsink:
            dsink = new((p.num_heads_q,), p.lse_dtype)
        if not has_pairs:
            for gradient in call.gradients.values():
                backend.copy(gradient, new(gradient.shape, gradient.dtype))
            if p.dlse and p.return_dsink and 0 not in shapes[0]:
                dsink = backward(_with_a_key(call, backend), backend)[-1]
        else:
            target = backend.target
            recipe = _backward_recipe(signature, target, target.family)
            written = gradients
            if recipe.copies:
                written = [
                    new_or_same(recipe.copies.get(name), gradient, backend)
                    for name, gradient in zip(
                        _GRADIENTS, gradients, strict=True
                    )
                ]
            others = (dbias, dsink) if recipe.options else ()
            _launch(recipe, call, backend, written, others)
            for gradient, copy in zip(gradients, written, strict=True):
                if copy is not gradient:
                    backend.copy(gradient, copy)
        if dbias is not None:
            if p.bias != p.lse_dtype:
                dtype = signature.options["bias"].dtype
                dbias = converted(dbias, dtype, backend)
            gradients.append(dbias)
        if dsink is not None:
            gradients.append(dsink)
    return tuple(gradients)


def _gradients(
    call: Call,
    shapes: tuple[tuple[int, ...], ...],
    new: Callable[[tuple[int, ...], Any], Any],
) -> list[Any]:
    """dq, dk and dv in full rank: the user's, or new ones."""
    dtype, given = call.signature.layouts["q"].dtype, call.gradients
    return [
        given[name] if name in given else new(shape, dtype)
        for name, shape in zip(_GRADIENTS, shapes, strict=True)
    ]


def _with_a_key(call: Call, backend: Backend) -> Call:
    """Add a dummy key, which contributes nothing, to a call without keys.

    Such a call computes dsink, which depends on sink, lse, delta and dlse
    alone: dlse reaches the sink of a query that sees no key.
    """
    signature = _signature_with_a_key(call.signature)
    new = {}
    for name in ("k", "v"):
        layout = signature.layouts[name]
        new[name] = backend.zeros(layout.shape, layout.dtype)
    read = {name: call.options[name] for name in signature.options}
    return Call(signature, {**call.given, **new}, None, read)


def merge_states(call: Call, backend: Backend) -> tuple[Any, Any]:
    """Run a merge_states call: out and lse in full rank."""
    signature = call.signature
    p, dtype = signature.problem, signature.layouts["out_a"].dtype
    lse_shape = lse_shape_of(p)
    with backend.current():
        out = backend.empty(out_shape_of(p), dtype)
        lse = backend.empty(lse_shape, p.lse_dtype)
        if 0 not in lse_shape:
            target = backend.target
            recipe = _merge_recipe(signature, target, target.family)
            arrays = [_readable(recipe, call, x, backend) for x in call.given]
            few = p.num_states <= FEW_STATES
            missing = (FEW_STATES if few else MOST_STATES) - p.num_states
            none = (0,) * missing
            addresses = (
                *backend.address(arrays[::2]),
                *none,
                *backend.address(arrays[1::2]),
                *none,
                *backend.address((out, lse), written=True),
            )
            arguments = _arguments(recipe, backend.tensor_map, addresses)
            backend.launch(recipe.loaded, arguments, recipe.template.kind)
    return out, lse


def apply_rotary(call: Call, backend: Backend) -> Any:
    """Run an apply_rotary call: out in full rank."""
    signature, out = call.signature, call.out
    layout = signature.layouts["x"]
    with backend.current():
        if out is None:
            out = backend.empty(layout.shape, layout.dtype)
        if 0 in layout.shape:
            return out
        target = backend.target
        recipe = _rotary_recipe(signature, target, target.family)
        written = new_or_same(recipe.copies.get("out"), out, backend)
        x = _readable(recipe, call, "x", backend)
        tables, read = _options_read(recipe, call, backend)
        addresses = (
            *read,
            *backend.address([x]),
            *backend.address([written], written=True),
        )
        arguments = _arguments(recipe, backend.tensor_map, addresses)
        backend.launch(recipe.loaded, arguments, recipe.template.kind)
        if written is not out:
            backend.copy(out, written)
    return out


# ---- Recipes ----


@remembered
def _forward_recipe(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> Recipe:
    p = signature.problem
    decided = decide(p, target, wanted)
    family, by_tma = decided.record, decided.record.loads_by_tma
    given = dict(signature.layouts)
    given.setdefault("out", layouts.new(out_shape_of(p), given["q"].dtype))
    taken = {x: family.readable(given[x]) for x in "qkv"}
    taken["out"] = layouts.writable(given["out"], by_tma)
    constants = {**layouts.row_strides(taken), **common_fields(p, decided)}
    rows: dict[str, int] = {}
    if by_tma:
        tile = decided.tile
        assert tile is not None  # only a merge plan has no tile
        rows = {"q": tile.block_q, "k": tile.block_k, "v": tile.block_k,
                "out": 16}  # fmt: skip
        constants["work_items"] = decided.work_items
    if family.splits_keys:
        constants["num_splits"] = decided.num_splits
    kinds = {
        (False, False): (ForwardArguments, ForwardOptionsArguments),
        (True, False): (ForwardWgmmaArguments, ForwardWgmmaOptionsArguments),
        (False, True): (ForwardSplitArguments, ForwardSplitOptionsArguments),
    }
    return _recipe(
        signature,
        target,
        decided,
        kinds[by_tma, family.splits_keys][bool(p.options)],
        constants,
        inputs=("q", "k", "v"),
        copies=layouts.changes(given, taken),
        boxes={name: Boxes.of(taken[name], n) for name, n in rows.items()},
    )


@remembered
def _backward_recipe(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> Recipe:
    p = signature.problem
    decided = decide(p, target, wanted)
    family, by_tma = decided.record, decided.record.loads_by_tma
    given = dict(signature.layouts)
    for name, shape in zip(_GRADIENTS, gradient_shapes_of(p), strict=True):
        given.setdefault(name, layouts.new(shape, given["q"].dtype))
    taken = {x: family.readable(given[x]) for x in ("dout", "q", "k", "v")}
    taken["out"] = family.readable(given["out"], by_tma=False)
    # prepare/delta.cu zeroes dq in order, where a kernel adds to it.
    writable_dq = layouts.contiguous if family.adds_to_dq else layouts.writable
    taken["dq"] = writable_dq(given["dq"])
    for name in ("dk", "dv"):
        taken[name] = layouts.writable(given[name], by_tma)
    constants = {**layouts.row_strides(taken), **common_fields(p, decided)}
    for name in ("lse", "dlse"):
        if name in given:
            taken[name] = layouts.contiguous(given[name])
    rows: dict[str, int] = {}
    if by_tma:
        tile = decided.tile
        assert tile is not None  # only a merge plan has no tile
        rows = {"q": tile.block_q, "dout": tile.block_q, "k": tile.block_k,
                "v": tile.block_k, "dk": 16, "dv": 16}  # fmt: skip
    kinds = {
        (False, False): BackwardPlainArguments,
        (False, True): BackwardOptionsArguments,
        (True, False): BackwardWgmmaArguments,
        (True, True): BackwardWgmmaOptionsArguments,
    }
    return _recipe(
        signature,
        target,
        decided,
        kinds[by_tma, bool(p.options)],
        constants,
        inputs=_BACKWARD_POINTERS[:6],
        last_input="dlse",
        copies=layouts.changes(given, taken),
        boxes={name: Boxes.of(taken[name], n) for name, n in rows.items()},
    )


# Cached, because recipes are found by the signature's identity.
@remembered
def _signature_with_a_key(signature: Signature) -> Signature:
    """Of `_with_a_key`: options that dsink does not depend on are left out."""
    p = replace(
        signature.problem,
        seqlen_k=1,
        causal=False,
        window=(None, None),
        softcap=0.0,
        dropout=0.0,
        alibi_slopes=False,
        bias=None,
        bias_is_broadcast=False,
        mask=False,
        segment_ids=False,
        max_seqlen_k=None,
        return_dbias=False,
    )
    _, k, v = gradient_shapes_of(p)
    given, dtype = dict(signature.layouts), signature.layouts["q"].dtype
    for name in _GRADIENTS:
        given.pop(name, None)
    given |= {"k": layouts.new(k, dtype), "v": layouts.new(v, dtype)}
    kept = ("sink", "cu_seqlens_q", "cu_seqlens_k")
    read = {name: x for name, x in signature.options.items() if name in kept}
    return Signature(p, signature.rank, given, options=read)


@remembered
def _merge_recipe(
    signature: Signature, target: Target, family: FamilyName | None
) -> Recipe:
    p, given = signature.problem, signature.layouts
    decided = decide(p, target, family)
    taken = {name: layouts.contiguous(x) for name, x in given.items()}
    few = p.num_states <= FEW_STATES
    template = Template(
        MergeArguments if few else MergeManyArguments,
        batch=p.batch,
        seqlen_q=p.seqlen_q,
        num_heads_q=p.num_heads_q,
        head_dim_v=p.head_dim_v,
        num_states=p.num_states,
    )
    return Recipe(
        decided,
        target.load(decided),
        template,
        inputs=tuple(taken),
        copies=layouts.changes(given, taken),
    )


_TABLES = ("cos", "sin", "positions")


def _table_dtype(rotary: Rotary, dtype: Any) -> np.dtype | None:
    """The dtype in which the kernel reads a table: positions are integers."""
    return np.dtype(rotary.positions) if dtype.kind in "iu" else None


@remembered
def _rotary_recipe(
    signature: Signature, target: Target, family: FamilyName | None
) -> Recipe:
    p, given = signature.problem, dict(signature.layouts)
    rotary = p.rotary
    assert rotary is not None
    decided = decide(p, target, family)
    given.setdefault("out", layouts.new(given["x"].shape, given["x"].dtype))
    rows = {name: layouts.by_any_element(x) for name, x in given.items()}
    tables = {
        name: layouts.by_element(x, _table_dtype(rotary, x.dtype))
        for name, x in signature.options.items()
    }
    template = Template(
        RotaryArguments,
        **{
            f"{name}_stride": layouts.element_strides(x)
            for name, x in {**rows, **tables}.items()
        },
        **rotary_fields(rotary),
        batch=p.batch,
        seqlen=p.seqlen_q,
        num_heads=p.num_heads_q,
        head_dim=p.head_dim,
        inverse=rotary.inverse,
    )
    return Recipe(
        decided,
        target.load(decided),
        template,
        inputs=("x",),
        copies=layouts.changes(given, rows)
        | layouts.changes(signature.options, tables),
        options=_TABLES,
    )


def _recipe(
    signature: Signature,
    target: Target,
    decided: Plan,
    kind: Any,
    constants: dict[str, Any],
    *,
    inputs: tuple[str, ...],
    copies: dict[str, Layout],
    boxes: Mapping[str, Boxes] | None = None,
    last_input: str = "",
) -> Recipe:
    """Build a recipe, and add the fields and copies of the options.

    `boxes` maps array names to their boxes.
    """
    has_options = bool(signature.problem.options)
    if has_options:
        read = options.as_read(signature)
        constants["options"] = options.numbers(signature, read)
        copies |= layouts.changes(signature.options, read)
    names = pointers_of(kind)
    before_inputs = names[: names.index(inputs[0])]
    return Recipe(
        decided,
        target.load(decided),
        Template(kind, **constants),
        inputs=inputs,
        copies=copies,
        boxes=tuple(
            (names.index(name), box) for name, box in (boxes or {}).items()
        ),
        workspace=workspace.sizes(
            decided.workspace, (x for x in names if x in workspace.NAMES)
        ),
        buffers_before_inputs=sum(x in workspace.NAMES for x in before_inputs),
        options=options.ARRAYS if has_options else (),
        last_input=last_input,
    )


# ---- Launches ----


def _launch(
    recipe: Recipe,
    call: Call,
    backend: Backend,
    written: Any,
    gradients: tuple[Any, ...] = (),
) -> None:
    """Launch a recipe's kernels on a call's inputs and the arrays `written`.

    `gradients` are dbias and dsink, which follow the options' workspace in
    the struct.
    """
    arrays = [call.given[name] for name in recipe.inputs]
    if recipe.copies:
        arrays = [
            _readable(recipe, call, name, backend) for name in recipe.inputs
        ]
    # Kept alive until the kernels are queued: after that, the stream's order
    # makes it safe to reuse the memory.
    kept: Any = None
    buffers: list[int] = []
    if recipe.workspace:
        kept, buffers = backend.workspace(recipe.workspace)
    inputs = backend.address(arrays)
    outputs = backend.address(written, written=True)
    if recipe.last_input:
        last = _readable(recipe, call, recipe.last_input, backend)
        outputs += backend.address([last])
    split = recipe.buffers_before_inputs
    if recipe.options:
        copies, given = _options_read(recipe, call, backend)
        addresses = (
            *given,
            call.seed,
            *buffers[:split],
            *backend.address(gradients, written=True),
            *inputs,
            *buffers[split:],
            *outputs,
        )
    else:
        addresses = (*buffers[:split], *inputs, *buffers[split:], *outputs)
    arguments = _arguments(recipe, backend.tensor_map, addresses)
    backend.launch(recipe.loaded, arguments, recipe.template.kind)


# Addresses repeat: results come from a memory pool, weights do not move.
@remembered
def _arguments(
    recipe: Recipe,
    tensor_map: Callable[[int, Boxes], bytes],
    addresses: tuple[int, ...],
) -> bytes:
    maps = [tensor_map(addresses[i], boxes) for i, boxes in recipe.boxes]
    return recipe.template.fill(maps, addresses)


def _readable(recipe: Recipe, call: Call, name: str, backend: Backend) -> Any:
    """An input, or its copy in a layout that kernels can read; or None."""
    layout = recipe.copies.get(name)
    if layout is None:
        return call.given.get(name)
    return copied(layout, call.arrays[name], backend)


def copied(layout: Layout, array: Any, backend: Backend) -> Any:
    """A copy of an array in full rank, with a layout of `layouts.new`."""
    copy = new_array(layout, backend)
    backend.copy(copy, array)
    return copy


def new_or_same(layout: Layout | None, result: Any, backend: Backend) -> Any:
    """The array that kernels write: the result or one to copy from."""
    return result if layout is None else new_array(layout, backend)


def _options_read(
    recipe: Recipe, call: Call, backend: Backend
) -> tuple[list[Any], list[int]]:
    """The option arrays that kernels read, to keep alive, and addresses."""
    arrays = []
    for name in recipe.options:
        array: Any = call.options.get(name)
        layout = recipe.copies.get(name)
        if layout is not None:
            array = copied_option(layout, array, backend)
        arrays.append(array)
    return arrays, backend.address(arrays)


def copied_option(layout: Layout, array: Any, backend: Backend) -> Any:
    """A copy of an option array, with a layout of `layouts.by_element`."""
    missing = (1,) * (len(layout.shape) - array.ndim)
    given = array.reshape(missing + array.shape)
    copy = backend.empty(layout.shape, layout.dtype)
    backend.copy(copy, given[tuple(slice(n) for n in layout.shape)])
    return copy


def new_array(layout: Layout, backend: Backend) -> Any:
    """A new array with a layout that `layouts.new` returned."""
    rows = backend.empty(layouts.allocated(layout), layout.dtype)
    return rows[..., : layout.shape[-1]]


def converted(array: Any, dtype: Any, backend: Backend) -> Any:
    """A copy, converted to the dtype."""
    copy = backend.empty(array.shape, dtype)
    backend.copy(copy, array)
    return copy


# ---- Shapes and other constants ----


def out_shape_of(p: Problem) -> tuple[int, ...]:
    """The shape of out."""
    return p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v


def lse_shape_of(p: Problem) -> tuple[int, ...]:
    """The shape of lse."""
    return p.batch, p.num_heads_q, p.seqlen_q


def gradient_shapes_of(p: Problem) -> tuple[tuple[int, ...], ...]:
    """The shapes of dq, dk and dv."""
    return (
        (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim),
        (p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim),
        (p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim_v),
    )


def rotary_fields(rotary: Rotary) -> dict[str, int]:
    """The struct fields that say which columns are pairs."""
    num_pairs = rotary.rotary_dim // 2
    return {
        "num_positions": rotary.num_positions,
        "num_pairs": num_pairs,
        "pair_step": 2 if rotary.interleaved else 1,
        "pair_width": 1 if rotary.interleaved else num_pairs,
    }


def common_fields(p: Problem, decided: Plan) -> dict[str, Any]:
    """The struct fields that all attention kernels have."""
    return {
        "shape": (p.batch, p.seqlen_q, p.seqlen_k, p.num_heads_q,
                  p.num_heads_kv, p.head_dim, p.head_dim_v),
        "schedule": (decided.heads_per_section, decided.last_section),
        "scale": p.scale,
    }  # fmt: skip
