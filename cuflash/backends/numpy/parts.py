"""What a call on NumPy arrays is made of: parts of one kind each.

A part is a packed sequence, or the whole call. Where batch elements differ in
their `Kind`, each is a part of its own. Of UNBOUNDED ones some rows are
flagged (`flagged`), which makes the others BOUNDED.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.arrays import OF_KEYS, OPTIONS, Arrays
from cuflash.backends.numpy.flagged import (
    Flagged,
    Values,
    beyond,
    bounded_options,
    find,
)
from cuflash.backends.numpy.kinds import LARGEST_VALUE, Kind
from cuflash.backends.numpy.rows import Rows, cut
from cuflash.backends.numpy.scores import Heads, of_heads, options_of
from cuflash.reference.packed import spans
from cuflash.request.problem import Call

_ALL = slice(None)
_ALL_HEADS = _ALL, _ALL, _ALL


class Part(NamedTuple):
    """A range of queries and keys that is computed at once, with options."""

    queries: slice
    keys: slice
    options: dict[str, Any]
    heads: Heads = _ALL_HEADS
    kind: int = Kind.BOUNDED
    flagged: Flagged | None = None

    def of(self, arrays: Arrays) -> Arrays:
        """Return views of its own heads, queries and keys."""
        if self.queries is _ALL and self.heads is _ALL_HEADS:
            return arrays
        return {
            name: of_heads(x, self.heads)
            if name in OPTIONS
            else x[(*self.heads, self._tokens(name))]
            for name, x in arrays.items()
        }

    def _tokens(self, name: str) -> slice:
        return self.keys if name in OF_KEYS else self.queries

    def bounded(self, own: Arrays) -> Arrays:
        """Return its own arrays with 0 for what is flagged."""
        return own if self.flagged is None else self.flagged.bounded(own)

    def checked(self, lse: np.ndarray, seqlen_k: int) -> Part:
        """Flag rows too whose scores are not bounded, as their lse shows."""
        flagged = beyond(self.flagged, lse, seqlen_k, self.options)
        return self._replace(flagged=flagged)

    def rows(self) -> Iterator[Rows]:
        """Return its flagged rows."""
        return iter(()) if self.flagged is None else cut(self.flagged)


def parts(
    call: Call,
    options: dict[str, Any],
    arrays: Arrays,
    directions: Sequence[Arrays] = (),
    largest: float = LARGEST_VALUE,
) -> Iterator[Part]:
    """Cut a call into parts of one `Kind` each.

    options : the call's. Beside v, what backward has and tangents are BOUNDED
    up to `largest`.
    """
    for part in sequences(call, options):
        moved = [part.of(x) for x in directions]
        values = Values(part.of(arrays), moved, largest)
        found = values.kinds(part.options)
        if (found == Kind.UNBOUNDED).any():
            flagged, found = find(values, part.options)
            bounded = bounded_options(values, part.options)
            part = part._replace(options=bounded, flagged=flagged)
        if len({*found.tolist()}) <= 1:
            yield part._replace(kind=max(found, default=Kind.SMALL))
            continue
        for number, kind in enumerate(found):
            heads = (slice(number, number + 1), _ALL, _ALL)
            own = options_of(part.options, heads)
            one = part._replace(heads=heads, options=own, kind=kind)
            if part.flagged is not None:
                one = one._replace(flagged=part.flagged.of(heads))
            yield one


def sequences(call: Call, options: dict[str, Any]) -> Iterator[Part]:
    """The whole call, or each of its packed sequences."""
    p = call.problem
    if p.num_sequences is None:
        yield Part(_ALL, _ALL, options)
        return
    for number, queries, keys in spans(
        call.options["cu_seqlens_q"],
        call.options["cu_seqlens_k"],
        p.seqlen_q,
        p.seqlen_k,
        p.max_seqlen_q,
        p.max_seqlen_k,
    ):
        own = dict(options)
        if "dropout" in own:
            own["dropout"] = own["dropout"]._replace(batch=number)
        if "head_indices" in own:
            own["head_indices"] = own["head_indices"]._replace(batch=number)
        slopes = own.get("alibi_slopes")
        if slopes is not None and np.ndim(call.options["alibi_slopes"]) == 2:
            own["alibi_slopes"] = slopes[number, None]
        yield Part(queries, keys, own)
