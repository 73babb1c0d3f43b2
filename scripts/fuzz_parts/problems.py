"""Draws the problems of a program: lengths, data, strides, orders of warps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from helpers.data import LAYOUTS, Case, Emulation
from helpers.kvcache_calls import KVCase
from strategies import EDGES, VALUES

from .programs import Program, pick

# Most multiply-adds of one forward pass, drawn log-uniform up to here: of the
# emulator a twentieth of strategies.LARGEST_WORK, which takes a second; of a
# GPU as much as the reference does in a third of a second.
MOST_WORK = {"emulator": 1 << 19, "gpu": 1 << 25}
# Later directions do this multiple of a forward pass's work.
TIMES = {"backward": 2, "packed": 3, "jvp": 2, "double_backward": 4}
FEWEST_KEYS_OF_DECODING = 512  # from which a call decodes by itself
LONGEST = {"emulator": 300, "gpu": FEWEST_KEYS_OF_DECODING - 1}
BOUNDS = (0, 1, 15, 16, 17, 63, 64, 65)  # of windows


@dataclass(frozen=True)
class Work:
    """How much one problem may be.

    most : multiply-adds of a forward pass.
    longest : tokens.
    """

    most: float
    longest: int


def draw(program: Program, index: int, on: str) -> Case | KVCase:
    """Return problem `index` of a program, always the same one.

    on : "emulator" or "gpu".
    """
    rng = np.random.default_rng([program.seed, index])
    most = MOST_WORK[on] / TIMES.get(program.direction, 1)
    most *= 2.0 ** -rng.uniform(0, 6)
    work = Work(most, LONGEST[on])
    if program.direction == "forward_kvcache":
        return _cached(rng, program, work)
    return _case(rng, program, work)


def length(rng: np.random.Generator, most: float) -> int:
    """Draw a length: any, or at an edge of a tile.

    One in thirty may be 0: there is no kernel to launch then.
    """
    most = max(int(most), 1)
    least = 0 if rng.random() < 1 / 30 else 1
    if rng.random() < 0.5:
        return int(pick(rng, [n for n in EDGES if least <= n <= most]))
    return int(rng.integers(least, most + 1))


def _heads(rng: np.random.Generator) -> tuple[int, int, int]:
    """Draw batch, num_heads_q, num_heads_kv."""
    heads_kv = int(pick(rng, (1, 1, 2)))
    group = int(pick(rng, (1, 1, 2, 3)))
    return int(pick(rng, (1, 1, 2))), heads_kv * group, heads_kv


def _case(rng: np.random.Generator, program: Program, work: Work) -> Case:
    case = program.case
    batch, heads_q, heads_kv = _heads(rng)
    columns = case.head_dim + case.head_dim_v
    pairs = work.most / (batch * heads_q * columns)
    longest = work.longest
    if program.direction in ("jvp", "double_backward"):
        longest = min(longest, 130)  # bounds of whole arrays grow with it
    first = length(rng, min(longest, pairs))
    second = length(rng, min(longest, pairs / max(first, 1)))
    seqlen_q, seqlen_k = (first, second)[:: pick(rng, (1, -1))]
    if program.decodes:
        heads_q = heads_kv * program.group_size
        most = 40 if program.family == "decode_sm90" else 4
        seqlen_q = int(rng.integers(1, most + 1))
        least = 1 if program.family else FEWEST_KEYS_OF_DECODING
        seqlen_k = int(rng.integers(least, 900))
    if program.direction == "packed":
        batch = 1
    case = replace(
        case,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        layout=_layout(rng),
        values=_values(rng),
        seed=int(rng.integers(2**32)),
        on=_machine(rng, case.on),
    )
    if program.direction == "packed":
        case = replace(case, offsets=_offsets(rng, seqlen_q, seqlen_k))
    if "window" in program.options:
        window = _window(rng, program, seqlen_q, seqlen_k)
        case = replace(case, window=window)
    if "dropout" in program.options:
        case = replace(case, dropout=pick(rng, (0.25, 0.5)))
    return case


def _layout(rng: np.random.Generator) -> str:
    if rng.random() < 0.5:
        return "contiguous"
    return pick(rng, tuple(LAYOUTS))


def _values(rng: np.random.Generator) -> str:
    return "normal" if rng.random() < 0.4 else pick(rng, VALUES)


def _machine(rng: np.random.Generator, on: Emulation) -> Emulation:
    """Draw the order of warps, and how many blocks run at once."""
    return replace(
        on,
        seed=int(rng.integers(2**32)),
        # With one resident block, waiting for a later block deadlocks.
        resident=int(pick(rng, (0, 1, 1, 2, 3, 5))),
    )


def _window(
    rng: np.random.Generator, program: Program, seqlen_q: int, seqlen_k: int
) -> tuple[int | None, int | None]:
    """Draw bounds; most mask something, as those that do not are left out.

    A right bound of 0 is causal, which is another program's.
    """

    def bound(least: int, most: int) -> int:
        most = max(most, least)
        if rng.random() < 0.05:
            return int(rng.integers(least, 2 * most + 2))
        if rng.random() < 0.5:
            known = [x for x in BOUNDS if least <= x <= most]
            return int(pick(rng, known or (most,)))
        return int(rng.integers(least, most + 1))

    left, right = program.bounded
    return (
        bound(0, seqlen_k - 2) if left or program.case.causal else None,
        bound(1, seqlen_q - 2) if right else None,
    )


def _offsets(
    rng: np.random.Generator, *totals: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw where sequences end; tokens after the last belong to none."""
    count = int(rng.integers(0, 7))
    q, k = (
        (0, *sorted(length(rng, total) for _ in range(count)))
        if total
        else (0,) * (count + 1)
        for total in totals
    )
    return q, k


def _each(
    rng: np.random.Generator, count: int, values: Sequence[int], most: int
) -> tuple[int, ...]:
    """Draw a few of the values, or any up to the most, for each sequence."""
    return tuple(
        int(pick(rng, values))
        if rng.random() < 0.5
        else int(rng.integers(0, most + 1))
        for _ in range(count)
    )


def _cached(rng: np.random.Generator, program: Program, work: Work) -> KVCase:
    case, cache = program.case, dict(program.cache)
    batch, heads_kv = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    group = program.group_size
    columns = case.head_dim + case.head_dim_v
    room = work.most / (batch * heads_kv * group * columns)
    queries = min(40, int(room))
    longest = min(work.longest, room / max(queries / 2, 1))
    before = tuple(length(rng, longest) for _ in range(batch))
    by_int, appends = cache.pop("by_int"), cache.pop("appends")
    if by_int:
        before = before[:1] * batch
    few = (0, 1, 2, 5)
    ragged = _each(rng, batch, few, queries) if cache["ragged"] else None
    leftpad = _each(rng, batch, few, 40) if cache["leftpad"] else None
    numbers: dict[str, Any] = {}
    if "window" in program.options:
        longest_q = max(queries, 2)
        numbers["window"] = _window(rng, program, longest_q, int(longest))
    if "16" in case.dtype:
        numbers["num_splits"] = pick(rng, (None, None, 1, 2, 5))
    return KVCase(
        **{**cache, "ragged": ragged, "leftpad": leftpad},
        dtype=case.dtype,
        before=before,
        by_int=by_int,
        seqlen_q=_each(rng, 1, few, queries)[0],
        unused=int(rng.integers(0, 3)),
        seqlen_new=int(rng.integers(0, 6)) if appends else None,
        num_heads_kv=heads_kv,
        group_size=group,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        spare=int(rng.integers(0, 4)),
        scale=case.scale,
        causal=case.causal,
        softcap=case.softcap,
        arrays_of=case.arrays_of,
        values=_values(rng),
        seed=int(rng.integers(2**32 - 4)),
        on=_machine(rng, case.on),
        **numbers,
    )


def labels(program: Program, problem: Case | KVCase) -> dict[str, Any]:
    """Return what a problem counts as, apart from its family."""
    asked = [x for x in program.options if x != "segment_ids_k"]
    if program.direction == "forward_kvcache":
        has = "page_size", "slots", "leftpad", "rotary_dim", "ragged"
        asked += [x for x in has if getattr(problem, x)]
        asked += ["float8"] if problem.scales else []
    if program.direction in ("backward", "packed"):
        asked += ["deterministic"] if problem.deterministic else []
    if program.direction == "backward":
        asked += ["dlse"] if program.dlse else []
    kind = problem.precision if isinstance(problem, Case) else None
    return {
        "direction": program.direction,
        "dtype": problem.dtype,
        "options": [x.removesuffix("_of_batches") for x in asked],
        "values": problem.values,
        "layout": problem.layout,
        "precision": kind,
    }
