"""What calls do besides computing: the same bits again, graphs, streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cuflash.check import run
from cuflash.check.calls import Call, Shape
from cuflash.check.compare import compared
from cuflash.check.expected import expected
from cuflash.check.gpu import Gpu, other_values
from cuflash.check.run import Place


class Behaved(NamedTuple):
    """A behaviour of a call, and what is wrong with it: '' if nothing."""

    name: str
    call: Call
    fault: str


def repeats(calls: list[Call], place: Place) -> Iterator[Behaved]:
    """The same bits in two runs, of a deterministic call a family."""
    seen = set()
    for call in calls:
        key = call.family, call.kind
        if call.deterministic and key not in seen:
            seen.add(key)
            yield _behaved("same bits twice", call, _twice, call, place)


def on_gpu(dtypes: tuple[Any, ...], gpus: list[Gpu]) -> Iterator[Behaved]:
    """A CUDA graph and two streams, in each dtype; the second GPU."""
    first, *others = gpus
    for dtype in dtypes:
        for call in _kept(dtype):
            other = other_values(call)
            two = call, other
            yield _behaved("CUDA graph", call, _replayed, first, *two)
            yield _behaved("two streams", call, _on_streams, first, *two)
            for gpu in others[:1]:
                yield _behaved("second GPU", call, _is_off, call, gpu)


def _kept(dtype: Any) -> tuple[Call, Call]:
    """Calls by whichever family runs them, whose bits do not change."""
    shape = Shape(2, 130, 129)
    chosen = ("causal",)
    first = Call("backward", dtype, shape, options=chosen, deterministic=True)
    shape = Shape(3, 4, 129, 4, 2)
    return first, Call("kvcache", dtype, shape, options=chosen, cache="paged")


def _twice(call: Call, place: Place) -> str:
    return _differs(run.run(call, place), run.run(call, place))


def _replayed(gpu: Gpu, call: Call, other: Call) -> str:
    return _differs(gpu.replayed(call, other), run.run(other, gpu))


def _on_streams(gpu: Gpu, call: Call, other: Call) -> str:
    both = gpu.on_two_streams((call, other))
    alone = [run.run(x, gpu) for x in (call, other)]
    return _differs(both[0], alone[0]) or _differs(both[1], alone[1])


def _behaved(
    name: str, call: Call, fault: Callable[..., str], *of: Any
) -> Behaved:
    try:
        return Behaved(name, call, fault(*of))
    except Exception as error:  # whatever is broken is reported
        return Behaved(name, call, f"{type(error).__name__}: {error}")


def _differs(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first result whose bits differ."""
    for name, array in one.items():
        a, b = (np.ascontiguousarray(x) for x in (array, other[name]))
        if a.tobytes() != b.tobytes():
            unlike = a.view(np.uint8) != b.view(np.uint8)
            return f"{name} differs in {unlike.mean():.2%} of its bytes"
    return ""


def _is_off(call: Call, place: Place) -> str:
    """The first result past its bound."""
    wanted = expected(call)
    for name, array in run.run(call, place).items():
        found = compared(name, array, wanted[name])
        if found.worst > 1:
            return str(found)
    return ""
