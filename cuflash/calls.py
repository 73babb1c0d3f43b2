"""From a checked call to launches: outputs, aligned copies, arguments.

All that follows from a call's signature is decided once and kept, as its
`Recipe`: the plan, which inputs have to be copied, every constant of the
argument struct. What is left for a call like one before are its addresses.

What a call needs of its arrays' library and of a device is a `Machine`:
`launch` has CuPy's, the emulator NumPy's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cuflash import settings, softcap
from cuflash.arguments import (
    BackwardArguments,
    BackwardOptionsArguments,
    BackwardWgmmaArguments,
    BackwardWgmmaOptionsArguments,
    ForwardArguments,
    ForwardOptionsArguments,
    ForwardWgmmaArguments,
    ForwardWgmmaOptionsArguments,
    MergeArguments,
    Template,
)
from cuflash.plan import Device, Family, Plan, plan
from cuflash.problem import Call, Layout, Problem, Signature


class Target(Protocol):
    """What recipes are made for and remembered by."""

    @property
    def family(self) -> Family | None:
        """The kernel family that is asked for."""

    def device(self) -> Device:
        """The device as plans see it."""

    def load(self, decided: Plan) -> Any:
        """A plan's kernels, as `Machine.launch` takes them."""

    def __hash__(self) -> int: ...


class Machine(Protocol):
    """Where the kernels of a call run."""

    @property
    def target(self) -> Target:
        """What its recipes are made for."""

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """A new array in C order, aligned as CUDA's allocator does it."""

    def rooms(self, sizes: tuple[int, ...]) -> tuple[Any, list[int]]:
        """New memory for kernels alone, of so many bytes each.

        Returns
        -------
        kept
            What the memory lives as long as.
        addresses : list of int
            Where each begins; 0 of those without a byte.
        """

    def addresses(
        self, arrays: Iterable[Any], written: bool = False
    ) -> list[int]:
        """Where kernels find first elements; whether they write to them.

        0 of None.
        """

    @staticmethod
    def tensor_map(address: int, boxes: Boxes) -> bytes:
        """A TensorMap of the array there that the boxes were made for."""

    def launch(self, loaded: Any, kind: np.dtype, arguments: bytes) -> None:
        """Run loaded kernels, in order, with one argument struct."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """What a TensorMap says of a 4-D array, but for its address.

    Attributes
    ----------
    shape : tuple of int
        (batch, token, head, column).
    strides : tuple of int
        (token, head, batch) in bytes.
    dtype : str
    rows : int
        Tokens of a box, which has 64 columns.
    """

    shape: tuple[int, ...]
    strides: tuple[int, int, int]
    dtype: str
    rows: int

    @classmethod
    def of(cls, array: Any, rows: int) -> Boxes:
        """Boxes of an array, or of a `Layout`."""
        # An axis of one element may have any stride, and here gets a legal
        # one.
        batch, token, head, _ = (
            stride if length > 1 else 16
            for stride, length in zip(array.strides, array.shape, strict=True)
        )
        return cls(array.shape, (token, head, batch), array.dtype.name, rows)


@dataclass(frozen=True, eq=False)
class Recipe:
    """What is decided about all calls of one signature.

    Attributes
    ----------
    decided : Plan
    loaded
        Its kernels, as the machine launches them.
    template : Template
        Of their argument struct.
    inputs : tuple of str
        What kernels read, in the order of the struct.
    copies : mapping of str to Layout
        What kernels cannot read, or write, in place; and as what they can.
    boxes : tuple of (int, Boxes)
        Which of the struct's pointers have a TensorMap too.
    rooms : tuple of int
        Bytes of what kernels need for themselves, in the struct's order.
    options : tuple of str
        Options that are arrays, in the order of the struct, which they
        lead. Calls without one of them have null there.
    """

    decided: Plan
    loaded: Any
    template: Template
    inputs: tuple[str, ...]
    copies: Mapping[str, Layout]
    boxes: tuple[tuple[int, Boxes], ...] = ()
    rooms: tuple[int, ...] = ()
    options: tuple[str, ...] = ()


_remembered = functools.lru_cache(maxsize=4096)


def _decide(p: Problem, target: Target, family: Family | None) -> Plan:
    """How a target runs a problem; logged when it does so first."""
    decided = plan(p, target.device(), family)
    _log(decided, target)
    return decided


@_remembered
def _log(decided: Plan, target: Target) -> None:
    settings.logger().info("%s", decided)


# ---- The calls ----


def forward(call: Call, machine: Machine) -> tuple[Any, Any]:
    """Run a forward call: out in full rank and, if wanted, lse."""
    p = call.problem
    out, lse = call.out, None
    if out is None:
        out = machine.empty(_out_shape(p), call.given["q"].dtype)
    if call.return_lse:
        lse = machine.empty(_lse_shape(p), p.lse_dtype)
    if math.prod(_lse_shape(p)):
        target = machine.target
        recipe = _forward_recipe(call.signature, target, target.family)
        room = recipe.copies.get("out")
        written = out if room is None else _empty_like(room, machine)
        first = (_found(recipe, machine),) if recipe.options else ()
        _launch(recipe, call, machine, written, lse, first=first)
        if room is not None:
            out[...] = written
    return out, lse


@_remembered
def _forward_recipe(
    signature: Signature, target: Target, family: Family | None
) -> Recipe:
    p = signature.problem
    decided = _decide(p, target, family)
    by_tma = decided.family == "wgmma"
    given = dict(signature.layouts)
    given.setdefault("out", _new(_out_shape(p), given["q"].dtype))
    taken = {x: _readable(given[x], decided.family) for x in "qkv"}
    taken["out"] = _writable(given["out"], by_tma)
    constants = {**_strides(taken), **_common(p, decided)}
    boxes: Iterable[tuple[int, Boxes]] = ()
    if by_tma:
        tile = decided.tile
        assert tile is not None  # a merge's plan alone has none
        rows = tile.block_q, tile.block_k, tile.block_k, 16
        first = _pointers_before_arrays(ForwardOptionsArguments, p)
        boxes = enumerate(map(Boxes.of, taken.values(), rows), first)
        constants["work_items"] = decided.work_items
    kind = ForwardWgmmaArguments if by_tma else ForwardArguments
    options, copies = {}, _changes(given, taken)
    if p.options:
        kind = (
            ForwardWgmmaOptionsArguments if by_tma else ForwardOptionsArguments
        )
        options = _options(signature)
        constants["options"] = _option_numbers(signature, options)
        copies |= _changes(signature.options, options)
    return Recipe(
        decided,
        target.load(decided),
        Template(kind, **constants),
        inputs=("q", "k", "v"),
        copies=copies,
        boxes=tuple(boxes),
        options=_OPTION_POINTERS if p.options else (),
    )


def backward(call: Call, machine: Machine) -> tuple[Any, ...]:
    """Run a backward call: dq, dk, dv in full rank; dbias, dsink if wanted."""
    p = call.problem
    dtype = call.given["q"].dtype
    dq, dk, dv = gradients = [
        machine.empty(shape, dtype) for shape in _gradient_shapes(p)
    ]
    dbias = dsink = None
    if p.return_dbias:  # sums, to which pairs are added
        dbias = machine.empty(call.options["bias"].shape, p.lse_dtype)
        dbias.fill(0)
    if p.return_dsink:
        dsink = machine.empty(p.num_heads_q, p.lse_dtype)
    if not (dq.size and dk.size):  # no pair of a query and a key
        for gradient in (*gradients, *([] if dsink is None else [dsink])):
            gradient.fill(0)
        return dq, dk, dv, *_asked_for(call, dbias, dsink)
    target = machine.target
    recipe = _backward_recipe(call.signature, target, target.family)
    written = gradients
    if recipe.copies:
        written = [
            _empty_like(recipe.copies[name], machine)
            if name in recipe.copies
            else gradient
            for name, gradient in zip(_GRADIENTS, gradients, strict=True)
        ]
    first: tuple[Any, ...] = ()
    if recipe.options:
        first = (_found(recipe, machine), dbias, dsink)
    _launch(recipe, call, machine, *written, first=first)
    for gradient, room in zip(gradients, written, strict=True):
        if room is not gradient:
            gradient[...] = room
    return dq, dk, dv, *_asked_for(call, dbias, dsink)


def _asked_for(call: Call, dbias: Any, dsink: Any) -> list[Any]:
    """The further gradients that a call wants, dbias in the bias's dtype."""
    others = []
    if dbias is not None:
        dtype = call.options["bias"].dtype.newbyteorder("=")
        others.append(dbias.astype(dtype, copy=False))
    if dsink is not None:
        others.append(dsink)
    return others


@_remembered
def _backward_recipe(
    signature: Signature, target: Target, family: Family | None
) -> Recipe:
    p = signature.problem
    decided = _decide(p, target, family)
    by_tma = decided.family == "wgmma"
    given = dict(signature.layouts)
    for name, shape in zip(_GRADIENTS, _gradient_shapes(p), strict=True):
        given[name] = _new(shape, given["q"].dtype)
    taken = {
        x: _readable(given[x], decided.family) for x in ("dout", "q", "k", "v")
    }
    # No TensorMap is made of out.
    rows_by = "mma" if by_tma else decided.family
    taken["out"] = _readable(given["out"], rows_by)
    taken["lse"] = _contiguous(given["lse"])
    taken["dq"] = given["dq"]
    for name in ("dk", "dv"):
        taken[name] = _writable(given[name], by_tma)
    strides = _strides({x: taken[x] for x in taken if x != "lse"})
    boxes: Iterable[tuple[int, Boxes]] = ()
    if by_tma:
        tile = decided.tile
        assert tile is not None  # a merge's plan alone has none
        rows = {"q": tile.block_q, "dout": tile.block_q, "k": tile.block_k,
                "v": tile.block_k, "dk": 16, "dv": 16}  # fmt: skip
        first = _pointers_before_arrays(BackwardOptionsArguments, p)
        boxes = (
            (first + _BACKWARD_POINTERS.index(x), Boxes.of(taken[x], n))
            for x, n in rows.items()
        )
    kind = BackwardWgmmaArguments if by_tma else BackwardArguments
    constants = {**strides, **_common(p, decided)}
    copies = _changes(given, taken)
    if p.options:
        kind = (
            BackwardWgmmaOptionsArguments
            if by_tma
            else BackwardOptionsArguments
        )
        options = _options(signature)
        constants["options"] = _option_numbers(signature, options)
        copies |= _changes(signature.options, options)
    return Recipe(
        decided,
        target.load(decided),
        Template(kind, **constants),
        inputs=_BACKWARD_POINTERS[:6],
        copies=copies,
        boxes=tuple(boxes),
        rooms=_rooms(p, decided),
        options=_OPTION_POINTERS if p.options else (),
    )


def _rooms(p: Problem, decided: Plan) -> tuple[int, int, int]:
    """Bytes of delta, dq_sum and turns."""
    rows = decided.row_elements or math.prod(_lse_shape(p))
    row_bytes = rows * np.dtype(p.lse_dtype).itemsize
    return row_bytes, 4 * decided.sum_elements, 4 * decided.num_turns


def _pointers_of(kind: np.dtype) -> tuple[str, ...]:
    return tuple(name for name in kind.names or () if kind[name] == np.uint64)


def _pointers_before_arrays(kind: np.dtype, p: Problem) -> int:
    """Of options and what goes with them, which a call may not have."""
    return len(_pointers_of(kind)) if p.options else 0


_GRADIENTS = ("dq", "dk", "dv")
_BACKWARD_POINTERS = _pointers_of(BackwardArguments)
_OPTION_POINTERS = _pointers_of(ForwardOptionsArguments)[:-2]


def merge_states(call: Call, machine: Machine) -> tuple[Any, Any]:
    """Run a merge_states call: out and lse in full rank."""
    p = call.problem
    out = machine.empty(_out_shape(p), call.given["out_a"].dtype)
    lse = machine.empty(_lse_shape(p), p.lse_dtype)
    if lse.size:
        target = machine.target
        recipe = _merge_recipe(call.signature, target, target.family)
        _launch(recipe, call, machine, out, lse)
    return out, lse


@_remembered
def _merge_recipe(
    signature: Signature, target: Target, family: Family | None
) -> Recipe:
    p, given = signature.problem, signature.layouts
    decided = _decide(p, target, family)
    taken = {name: _contiguous(layout) for name, layout in given.items()}
    return Recipe(
        decided,
        target.load(decided),
        Template(
            MergeArguments,
            batch=p.batch,
            seqlen_q=p.seqlen_q,
            num_heads_q=p.num_heads_q,
            head_dim_v=p.head_dim_v,
        ),
        inputs=tuple(taken),
        copies=_changes(given, taken),
    )


def _launch(
    recipe: Recipe,
    call: Call,
    machine: Machine,
    *written: Any,
    first: tuple[Any, ...] = (),
) -> None:
    """Run the kernels on a call's inputs, and on what they write to.

    Of that, `first` stands in the struct right after options and seed.
    """
    arrays = [call.given[name] for name in recipe.inputs]
    if recipe.copies:
        arrays = [
            _copied(recipe, call, name, machine) for name in recipe.inputs
        ]
    # Kept until the kernels are queued: then the next in the queue may have
    # the memory.
    kept, rooms = machine.rooms(recipe.rooms)
    addresses = (
        *machine.addresses(arrays),
        *rooms,
        *machine.addresses(written, written=True),
    )
    if recipe.options:
        copies, options = _options_read(recipe, call, machine)
        before = machine.addresses(first, written=True)
        addresses = (*options, call.seed, *before, *addresses)
    arguments = _arguments(recipe, machine.tensor_map, addresses)
    machine.launch(recipe.loaded, recipe.template.kind, arguments)


# Addresses repeat: results come from a pool, weights stay where they are.
@_remembered
def _arguments(
    recipe: Recipe,
    tensor_map: Callable[[int, Boxes], bytes],
    addresses: tuple[int, ...],
) -> bytes:
    maps = [tensor_map(addresses[i], boxes) for i, boxes in recipe.boxes]
    return recipe.template.fill(maps, addresses)


def _options_read(
    recipe: Recipe, call: Call, machine: Machine
) -> tuple[list[Any], list[int]]:
    """Options as kernels read them, to be kept, and their addresses."""
    arrays = []
    for name in recipe.options:
        array: Any = call.options.get(name)
        layout = recipe.copies.get(name)
        if layout is not None:
            missing = (1,) * (len(layout.shape) - array.ndim)
            given = array.reshape(missing + array.shape)
            array = machine.empty(layout.shape, layout.dtype)
            array[...] = given[tuple(slice(n) for n in layout.shape)]
        arrays.append(array)
    return arrays, machine.addresses(arrays)


def _found(recipe: Recipe, machine: Machine) -> Any:
    """Room for what the first launch finds, None if it is not for that."""
    count = recipe.decided.num_found
    return machine.empty(count, np.int32) if count else None


def _copied(recipe: Recipe, call: Call, name: str, machine: Machine) -> Any:
    """An input as kernels take it."""
    layout = recipe.copies.get(name)
    if layout is None:
        return call.given[name]
    copy = _empty_like(layout, machine)
    copy[...] = call.arrays[name]
    return copy


# ---- Shapes and other constants ----


def _out_shape(p: Problem) -> tuple[int, ...]:
    return p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v


def _lse_shape(p: Problem) -> tuple[int, ...]:
    return p.batch, p.num_heads_q, p.seqlen_q


def _gradient_shapes(p: Problem) -> tuple[tuple[int, ...], ...]:
    """Of dq, dk and dv."""
    return (
        (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim),
        (p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim),
        (p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim_v),
    )


def _common(p: Problem, decided: Plan) -> dict[str, Any]:
    """The fields that all attention kernels take."""
    return {
        "shape": (p.batch, p.seqlen_q, p.seqlen_k, p.num_heads_q,
                  p.num_heads_kv, p.head_dim, p.head_dim_v),
        "schedule": (decided.heads_per_section,),
        "scale": p.scale,
    }  # fmt: skip


def _strides(layouts: Mapping[str, Layout]) -> dict[str, tuple[int, ...]]:
    """The (batch, token, head) strides of 4-D arrays, in elements.

    0 for an axis of one, whose stride may be anything: kernels form the
    addresses of rows past the end too, which have to be aligned.
    """
    return {
        f"{name}_stride": tuple(
            stride // x.dtype.itemsize if length > 1 else 0
            for stride, length in zip(
                x.strides[:-1], x.shape[:-1], strict=True
            )
        )
        for name, x in layouts.items()
    }


# ---- Options ----


def _options(signature: Signature) -> dict[str, Layout]:
    """The layouts in which kernels read options, by one element at a time.

    A copy has the axes that the user gave it: 1 where the stride is 0.
    """
    taken = {}
    for name, layout in signature.options.items():
        itemsize = layout.dtype.itemsize
        in_place = layout.dtype.isnative and not any(
            x % itemsize for x in (layout.offset, *layout.strides)
        )
        taken[name] = layout if in_place else _compact(layout)
    return taken


def _compact(layout: Layout) -> Layout:
    shape = tuple(
        1 if stride == 0 else size
        for size, stride in zip(layout.shape, layout.strides, strict=True)
    )
    new = _new((1, *shape), layout.dtype)
    kept = zip(new.strides[1:], layout.strides, strict=True)
    strides = tuple(stride if old else 0 for stride, old in kept)
    return Layout(shape, strides, new.dtype)


def _option_numbers(
    signature: Signature, options: Mapping[str, Layout]
) -> tuple:
    """`OptionNumbers` of a call."""
    p = signature.problem

    def strides(name: str, axes: int) -> tuple[int, ...]:
        if name not in options:
            return (0,) * axes
        layout = options[name]
        return tuple(x // layout.dtype.itemsize for x in layout.strides)

    left, right = p.window
    if p.causal:
        right = 0
    return (
        strides("bias", 4),
        strides("mask", 4),
        _dbias_strides(signature.bias_shape),
        strides("alibi_slopes", 2),
        strides("segment_ids_q", 2),
        strides("segment_ids_k", 2),
        strides("sink", 1)[0],
        p.softcap,
        *softcap.terms(p.scale, p.softcap),
        *softcap.slight_terms(p.scale, p.softcap, p.dtype, p.dropout),
        1.0 / (1.0 - p.dropout),
        strides("cu_seqlens_q", 1)[0],
        strides("cu_seqlens_k", 1)[0],
        p.seqlen_k if left is None else left,
        p.seqlen_q if right is None else right,
        int(p.dropout * 2.0**32),
        p.num_sequences or 0,
        p.seqlen_q,
        p.seqlen_k,
        p.seqlen_q if p.max_seqlen_q is None else p.max_seqlen_q,
        p.seqlen_k if p.max_seqlen_k is None else p.max_seqlen_k,
        0,
    )


def _dbias_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of sums of that shape in C order: 0 along axes that bias lacks.

    They follow from the shape that the user gave it and not from its strides:
    in a view of `broadcast_to` each element has a gradient of its own.
    """
    strides, step = [], 1
    for size in ((1,) * (4 - len(shape)) + shape)[::-1]:
        strides.append(0 if size == 1 else step)
        step *= size
    return tuple(strides[::-1])


# ---- Layouts: what kernels can take in place ----


def _readable(given: Layout, family: Family) -> Layout:
    """The layout, or that of a copy with aligned rows where it has none."""
    # All but the plain kernels read rows 16 bytes at a time, and rowsum(dO O)
    # those of 16-bit elements.
    itemsize = given.dtype.itemsize
    alignment = itemsize if family == "simt" and itemsize > 2 else 16
    if _in_place(given, alignment, by_tma=family == "wgmma"):
        return given
    return _aligned_rows(given)


def _writable(given: Layout, by_tma: bool) -> Layout:
    """The same for what is written, element by element or by TMA."""
    alignment = 16 if by_tma else given.dtype.itemsize
    if _in_place(given, alignment, by_tma):
        return given
    return _aligned_rows(given)


def _contiguous(given: Layout) -> Layout:
    """The layout, or that of a copy in C order where it is none."""
    new = _new(given.shape, given.dtype)
    if _in_place(given, given.dtype.itemsize) and _moves(given) == _moves(new):
        return given
    return new


def _in_place(layout: Layout, alignment: int, by_tma: bool = False) -> bool:
    """Whether a kernel can take rows of `alignment` bytes where they are.

    The TMA unit has no strides of 0 or less.
    """
    if 0 in layout.shape:
        return True
    itemsize = layout.dtype.itemsize
    if layout.shape[-1] > 1 and layout.strides[-1] != itemsize:
        return False
    if not layout.dtype.isnative:
        return False
    moves = _moves(layout)
    if by_tma and not all(stride > 0 for stride in moves):
        return False
    return not any(x % alignment for x in (layout.offset, *moves))


def _moves(layout: Layout) -> list[int]:
    """The strides between rows, of axes that have more than one."""
    sizes = zip(layout.strides[:-1], layout.shape[:-1], strict=True)
    return [stride for stride, length in sizes if length > 1]


def _new(
    shape: tuple[int, ...], dtype: np.dtype, width: int | None = None
) -> Layout:
    """That of a new array with rows of so many elements."""
    dtype = dtype.newbyteorder("=")
    strides = [dtype.itemsize]
    for length in (width or shape[-1], *shape[-2:0:-1]):
        strides.insert(0, strides[0] * length)
    return Layout(shape, tuple(strides), dtype)


def _aligned_rows(layout: Layout) -> Layout:
    """That of a new array like it, with rows at multiples of 16 bytes."""
    step = 16 // layout.dtype.itemsize
    width = -(-layout.shape[-1] // step) * step
    return _new(layout.shape, layout.dtype, width)


def _empty_like(layout: Layout, machine: Machine) -> Any:
    """A new array of a layout that `_new` made."""
    *others, columns = layout.shape
    width = layout.strides[-2] // layout.dtype.itemsize
    return machine.empty((*others, width), layout.dtype)[..., :columns]


def _changes(
    given: Mapping[str, Layout], taken: Mapping[str, Layout]
) -> dict[str, Layout]:
    return {name: x for name, x in taken.items() if x is not given[name]}
