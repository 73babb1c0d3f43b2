"""`Group`: the ranks that share sequences, and how arrays travel between them.

A transport is a subclass with two methods, `_exchange` and `gather_bytes`.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from cuflash.errors import DTypeError, GroupError, ValueRangeError
from cuflash.request import checks

from . import rearrange

# An array, contiguous, and the rank to which or from which it travels.
Message = tuple[Any, int]

DEFAULT_TIMEOUT = 300.0  # seconds
_LONGEST_TEXT = 1024  # bytes of a call's description


class Pending(Protocol):
    """Arrays that are travelling."""

    def wait(self) -> None:
        """Let the current stream (the caller, on a CPU) wait for them.

        Afterwards the sent arrays may be written and the received ones read.
        """


class Arrived:
    """A `Pending` of no arrays."""

    def wait(self) -> None:
        """Do nothing."""


class Group(abc.ABC):
    """The ranks that share sequences.

    All ranks make the same calls in the same order.

    Attributes
    ----------
    rank, size : int
    timeout : float
        Seconds after which a rank that waits for another raises GroupError.
    bytes_sent : int
        Of arrays, by this rank, since the group was made.
    """

    # Whether to compare each call with those of the other ranks, else only
    # the first of its kind.
    checks_each_call = True

    # Whether a rank launches what needs its own keys alone before it starts
    # exchanges: if they need no SMs, these get along beside it.
    launches_first = False

    # Whether all ranks compute on one device. Then nothing travels while
    # another rank computes.
    shares_device = False

    def __init__(
        self, rank: int, size: int, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self.size = checks.whole("size", size, 1, 2**31 - 1)
        self.rank = checks.whole("rank", rank, 0, self.size - 1)
        self.timeout = checks.real("timeout", timeout)
        self.bytes_sent = 0
        self._agreed: set[str] = set()

    @abc.abstractmethod
    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Any
    ) -> Pending:
        """Start to send and to receive arrays that are not empty."""

    @abc.abstractmethod
    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Bytes of each rank, as many from each."""

    def mark(self) -> Any:
        """This moment of the current stream, for `exchange`."""
        return None

    def sendable(self, array: Any) -> Any:
        """The array, or a copy that can be sent several times as it is.

        Send it, and let the stream wait for what travels, before the array is
        written.
        """
        return array

    def synchronize(self) -> None:
        """Wait for the current stream; raise GroupError if the group failed.

        On a CPU there is nothing to wait for: calls return with results.
        """
        return None

    def close(self) -> None:
        """Leave the group; all ranks do so together."""
        return None

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        after: Any = None,
    ) -> Pending:
        """Start to send arrays to ranks and to receive others.

        Parameters
        ----------
        sends, receives : sequence of (array, rank)
            Contiguous arrays. Between two ranks, arrays arrive in the order
            in which they were sent; sizes and dtypes match.
        after : optional
            What `mark` returned: arrays are sent and overwritten when the
            stream has reached that moment; by default, this one.
        """
        sends, receives = (
            [x for x in messages if x[0].size]
            for messages in (sends, receives)
        )
        if not sends and not receives:
            return Arrived()
        self.bytes_sent += sum(rearrange.nbytes(x) for x, _ in sends)
        return self._exchange(sends, receives, after)

    def agree(self, text: str) -> None:
        """Raise ValueRangeError on all ranks unless all give the same text.

        A group may leave the comparison to `confirm`.

        Parameters
        ----------
        text : str
            Describes a call.
        """
        if self.size == 1:
            return
        if text in self._agreed and not self.checks_each_call:
            return
        self._compare(text, self.gather_bytes(digest(text)))
        self._agreed.add(text)

    def confirm(self) -> None:
        """Wait until all ranks have made this call; raise as `agree` does."""
        return None

    def _compare(self, text: str, digests: list[bytes]) -> None:
        """Raise ValueRangeError if a rank's text has another digest."""
        if all(x == digest(text) for x in digests):
            return
        padded = text.encode()[:_LONGEST_TEXT].ljust(_LONGEST_TEXT)
        texts = self.gather_bytes(padded)
        calls = {
            x.decode(errors="replace").rstrip(): [
                rank for rank, y in enumerate(texts) if x == y
            ]
            for x in texts
        }
        each = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}:"
            f" {call}"
            for call, ranks in calls.items()
        )
        raise ValueRangeError(
            "the ranks of a group make different calls, expected the "
            f"same shapes, dtypes and options on each ({each})"
        )

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one raises an error."""
        if self.checks_each_call and self.size > 1:
            try:
                self.agree(f"{type(error).__name__}: {error}")
                self.confirm()
            except (ValueRangeError, GroupError):
                pass  # this rank raises `error`


def digest(text: str) -> bytes:
    """Bytes that tell a call from others."""
    return hashlib.sha256(text.encode()).digest()


class Subgroup(Group):
    """Some ranks of a group, with ranks of their own.

    Parameters
    ----------
    group : Group
    ranks : sequence of int
        Ranks of `group`, the caller's among them.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(group.rank), len(ranks), group.timeout)
        self.group, self.ranks = group, tuple(ranks)
        self.shares_device = group.shares_device
        self.launches_first = group.launches_first

    def mark(self) -> Any:
        return self.group.mark()

    def sendable(self, array: Any) -> Any:
        return self.group.sendable(array)

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Any
    ) -> Pending:
        return self.group.exchange(
            [(x, self.ranks[rank]) for x, rank in sends],
            [(x, self.ranks[rank]) for x, rank in receives],
            after,
        )

    def gather_bytes(self, data: bytes) -> list[bytes]:
        raise NotImplementedError("calls are compared in the whole group")


def check_on_device(array: Any, cupy: Any, device: int, reason: str) -> None:
    """Refuse what a group of GPUs cannot send or receive.

    Raises
    ------
    DTypeError
        If it is no CuPy array, which `reason` says why it has to be.
    ValueRangeError
        If it is not on the group's device.
    """
    if not isinstance(array, cupy.ndarray):
        raise DTypeError(
            f"got an array of type {type(array).__name__}, expected a CuPy "
            f"array: {reason}"
        )
    if array.data.device_id != device:
        raise ValueRangeError(
            f"got an array on CUDA device {array.data.device_id}, expected "
            f"device {device}, the group's"
        )
