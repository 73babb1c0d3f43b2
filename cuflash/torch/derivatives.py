"""Attention and its derivatives, closed under differentiation up to two.

    Forward:    x                         -> out, lse
    Tangents:   x', x, out, lse           -> out', lse'           jvp
    Gradients:  dout, dlse, x, out, lse   -> dx                   backward
    Second:     ddx, dout, dlse, x, out, lse -> d2x, ddout, ddlse

where x is q, k, v, the options that have gradients (options.MOVED) and the
arrays that a user's score reads (`Static.moving`). With
f = <dout, out> + <dlse, lse>, Gradients is the gradient of f, and d2x is the
Hessian of f, which is symmetric, times ddx. So Second is what the gradient of
Gradients is made of, the tangent of Gradients, and the gradient of Tangents.
out and lse are passed so that nobody computes them again: derivatives by way
of them are in d2x.

These functions take what torch.func asks for; `gradients.Attention` is the
shorter way of eager calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cuflash.errors import UnsupportedError
from cuflash.request.options import MOVED

from . import batched_grad
from .request import Request
from .request_derivatives import double_backward, jvp
from .vmap import Rule, over_first_axes

_THIRD = (
    "third derivatives of cuflash.torch.attention are not supported: call "
    "backward() or torch.autograd.grad() without create_graph"
)
_FORWARD_TWICE = (
    "forward mode twice over cuflash.torch.attention is not supported "
    "(torch.func.jvp of jvp, jacfwd of jacfwd): use reverse mode for one of "
    "them, as torch.func.hessian does"
)


@dataclass(frozen=True)
class Static:
    """What is not a tensor of a call.

    Attributes
    ----------
    request : Request
        Without its tensors.
    names : tuple of str
        Of the options' tensors, which follow the other tensors.
    wanted : tuple of str
        Those of `Request.moved` whose gradients are results.
    several : bool
        Whether tangents have an axis of directions before the others.
    """

    request: Request
    names: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    several: bool = False

    @property
    def moving(self) -> tuple[str, ...]:
        """What may have tangents and gradients: q, k, v first."""
        return ("q", "k", "v", *self.request.moved)

    @property
    def of_batch(self) -> bool:
        """Whether weights depend on the index in a batch."""
        return "dropout" in self.request.scalars or self.request.of_batch

    def by_name(self, others: Any) -> dict[str, Any]:
        """The options' tensors."""
        return dict(zip(self.names, others, strict=True))

    def moved(self, of_qkv: Any, of_others: Any) -> dict[str, Any]:
        """The tangents of a call's tensors that there are."""
        named = dict(zip("qkv", of_qkv, strict=True))
        named |= dict(zip(self.names, of_others, strict=True))
        moved = {name: x for name, x in named.items() if x is not None}
        for name in moved:
            if name not in self.moving:
                known = f"{', '.join(MOVED[:-1])} or {MOVED[-1]}"
                raise UnsupportedError(
                    f"{name} is differentiated, expected {known}: pass "
                    f"{name}.detach()"
                )
        return moved

    def for_gradients(self, needs: Any) -> Static:
        """Whose `wanted` are the options that need gradients."""
        needed = (True if needed else None for needed in needs)
        moved = self.moved((None,) * 3, needed)
        return replace(self, wanted=tuple(moved), several=False)

    def each(self, gradients: dict[str, Any]) -> tuple[Any, ...]:
        """Gradients of q, k, v and the options, None where there is none."""
        return tuple(gradients.get(x) for x in ("q", "k", "v", *self.names))


class _Function(torch.autograd.Function):
    """Saves all its tensors; leaves out tangents and gradients of 0.

    Where code that is compiled transforms a call, it runs in eager mode, and
    no compiler looks into the methods.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("forward", "backward", "jvp", "vmap"):
            method = torch.compiler.disable(getattr(cls, name))
            setattr(cls, name, staticmethod(method))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.static, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)


class Forward(_Function):
    """out and lse."""

    @staticmethod
    def forward(static: Static, *tensors: Any) -> Any:
        q, k, v, *others = map(plain, tensors)
        return static.request.forward(q, k, v, True, static.by_name(others))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        static, q, k, v, *others = inputs
        _Function.setup_context(
            ctx, (static, q, k, v, *output, *others), output
        )

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        static = ctx.static.for_gradients(ctx.needs_input_grad[4:])
        found = gradients_of(static, dout, dlse, ctx.saved_tensors)
        return None, *found[:3], *found[5:]

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        moved = ctx.static.moved(tangents[:3], tangents[3:])
        of_inputs = (moved.get(name) for name in ctx.static.moving)
        tangents_of = partial(Tangents.apply, ctx.static)
        return batched_grad.call(tangents_of, *of_inputs, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, static: Static, *tensors: Any) -> Any:
        names = ("q", "k", "v", *static.names)
        rule = Rule(Forward, static, names, ("out", "lse"))
        return rule.map(info, in_dims[1:], tensors)


class Tangents(_Function):
    """The tangents of out and lse."""

    @staticmethod
    def forward(static: Static, *tensors: Any) -> Any:
        moved, fixed = _parted(static, tensors)
        q, k, v, _out, _lse, *others = fixed
        given = {"q": q, "k": k, "v": v}
        request, named = static.request, static.by_name(others)
        return jvp(request, given, moved, named)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        static, needs = ctx.static, ctx.needs_input_grad[1:]
        moving = static.moving
        n = len(moving)
        tangents, fixed = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        of_tangents = replace(
            static,
            wanted=tuple(
                x for i, x in enumerate(moving) if i > 2 and needs[i]
            ),
            several=False,
        )
        of_inputs = static.for_gradients(needs[n + 5 :])

        def one(dout: Any, dlse: Any, *tangents: Any) -> tuple[Any, ...]:
            first = second = (None,) * len(fixed)
            if any(needs[:n]):
                first = gradients_of(of_tangents, dout, dlse, fixed)
            if any(needs[n:]):
                second, *_ = second_of(of_inputs, tangents, dout, dlse, fixed)
            named = dict(zip(_fixed_names(static), first, strict=True))
            return *(named.get(name) for name in moving), *second

        if not static.several:
            return None, *one(dout, dlse, *tangents)
        given = (dout, dlse, *tangents)
        mapped = [x is not None for x in given]
        found = over_first_axes(one, given, mapped)
        summed = (None if x is None else x.sum(0) for x in found[n:])
        return None, *found[:n], *summed

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(_FORWARD_TWICE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, static: Static, *tensors: Any) -> Any:
        names = (*static.moving, *_fixed_names(static))
        count = len(static.moving)
        rule = Rule(Tangents, static, names, ("out", "lse"), count)
        return rule.map_tangents(info, in_dims[1:], tensors)


class Gradients(_Function):
    """The gradients of q, k and v; then those of `wanted`."""

    @staticmethod
    def forward(static: Static, *tensors: Any) -> Any:
        dout, dlse, q, k, v, out, lse, *others = map(plain, tensors)
        found = static.request.backward(
            static.by_name(others), static.wanted,
            dout, dlse, q, k, v, out, lse,
        )  # fmt: skip
        return tuple(x for x in found if x is not None)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        static = ctx.static
        dout, dlse, *fixed = ctx.saved_tensors
        if all(x is None for x in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        named = dict(
            zip(("q", "k", "v", *static.wanted), cotangents, strict=True)
        )
        needed = static.for_gradients(ctx.needs_input_grad[8:])
        of_fixed, ddout, ddlse = second_of(
            needed, [named.get(x) for x in static.moving], dout, dlse, fixed
        )
        return None, ddout, ddlse, *of_fixed

    @staticmethod
    def jvp(
        ctx: Any,
        _: Any,
        dout_dot: Any,
        dlse_dot: Any,
        *tangents: Any,
    ) -> Any:
        static = ctx.static
        dout, dlse, *fixed = ctx.saved_tensors
        moved = static.moved(tangents[:3], tangents[5:])
        found: list[Any] = []
        if moved:
            cotangents = [moved.get(name) for name in static.moving]
            found.append(second_of(static, cotangents, dout, dlse, fixed)[0])
        if dout_dot is not None or dlse_dot is not None:
            found.append(gradients_of(static, dout_dot, dlse_dot, fixed))
        names = ("q", "k", "v", "out", "lse", *static.names)
        parts = [dict(zip(names, x, strict=True)) for x in found]
        results = ("q", "k", "v", *static.wanted)
        return tuple(sum(part[name] for part in parts) for name in results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, static: Static, *tensors: Any) -> Any:
        inputs = ("out", "lse", *_fixed_names(static))
        results = ("q", "k", "v", *static.wanted)
        rule = Rule(Gradients, static, inputs, results)
        return rule.map(info, in_dims[1:], tensors)


class Second(_Function):
    """The gradients of `Gradients`: d2q, d2k, d2v, ddout and those wanted."""

    @staticmethod
    def forward(static: Static, *tensors: Any) -> Any:
        moved, fixed = _parted(static, tensors)
        dout, dlse, q, k, v, out, lse, *others = fixed
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        wanted = static.wanted
        if dlse is not None:
            given["dlse"], wanted = dlse, (*wanted, "lse")
        named = static.by_name(others)
        return double_backward(static.request, given, moved, named, wanted)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(_THIRD)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(_THIRD)

    @staticmethod
    def vmap(info: Any, in_dims: Any, static: Static, *tensors: Any) -> Any:
        inputs = (*static.moving, "out", "lse", *_fixed_names(static))
        results = ("q", "k", "v", "out", *static.wanted)
        count = len(static.moving)
        if tensors[count + 1] is not None:  # dlse
            results = (*results, "lse")
        rule = Rule(Second, static, inputs, results, count)
        return rule.map(info, in_dims[1:], tensors)


def gradients_of(static: Static, dout: Any, dlse: Any, fixed: Any) -> Any:
    """Gradients of q, k, v, out, lse (None) and the options.

    `fixed` are q, k, v, out, lse and the options' tensors.
    """
    if dout is None:
        if dlse is None:
            return (None,) * len(fixed)
        dout = torch.zeros_like(fixed[3])
    gradients = partial(Gradients.apply, static)
    found = batched_grad.call(gradients, dout, dlse, *fixed)
    names = ("q", "k", "v", *static.wanted)
    each = static.each(dict(zip(names, found, strict=True)))
    return (*each[:3], None, None, *each[3:])


def second_of(
    static: Static, cotangents: Any, dout: Any, dlse: Any, fixed: Any
) -> tuple[Any, Any, Any]:
    """Second gradients: as `gradients_of`, of dout, and of dlse."""
    if dout is None:
        if dlse is None:
            return (None,) * len(fixed), None, None
        dout = torch.zeros_like(fixed[3])
    second = partial(Second.apply, static)
    found = batched_grad.call(second, *cotangents, dout, dlse, *fixed)
    names = ("q", "k", "v", "out", *static.wanted, "lse")
    named = dict(zip(names, found, strict=False))
    each = static.each(named)
    of_fixed = (*each[:3], None, None, *each[3:])
    return of_fixed, named["out"], named.get("lse")


def plain(x: Any) -> Any:
    """A tensor whose numbers are in its memory as they are."""
    if x is None:
        return None
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_neg()


def _parted(static: Static, tensors: Any) -> tuple[dict[str, Any], Any]:
    """Plain tensors: the first ones by what they move, and the others."""
    tensors = tuple(map(plain, tensors))
    named = dict(zip(static.moving, tensors, strict=False))
    moved = {name: x for name, x in named.items() if x is not None}
    return moved, tensors[len(static.moving) :]


def _fixed_names(static: Static) -> tuple[str, ...]:
    return ("q", "k", "v", "out", "lse", *static.names)
