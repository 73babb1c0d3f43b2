"""A call on real tensors, without autograd: a `Request` runs it.

Tensors on a CUDA device go to the kernels as they are. Tensors on the CPU
become NumPy arrays that share their memory, and `cuflash.api` does the rest.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cuflash import settings
from cuflash.api import arrays as api_arrays
from cuflash.api import attention as api_attention
from cuflash.launch import attention as execute
from cuflash.request import mod_tangents, options, traced
from cuflash.request.kept import Kept
from cuflash.request.problem import Call, strip, strip_lse
from cuflash.request.validate import attention as validate
from cuflash.request.validate import host_values, scalars

from .batched_grad import is_batched
from .dtypes import from_numpy, to_numpy
from .functions import Functions
from .signature import ROWS, by_heads, check_devices, checked, describe
from .tracing import PLAIN, by_operations

if TYPE_CHECKING:
    from cuflash.backends.base import Backend, Target
    from cuflash.request.problem import Signature

Results = tuple[torch.Tensor, ...]


class Request:
    """The arguments of `attention` other than q, k and v.

    Parameters
    ----------
    scale, causal, block_q, block_k, precision, num_splits, deterministic
    given : dict or None
        The options (options.TABLE) that differ from their defaults.
    functions : Functions or None
        A user's own score and mask.
    by_heads : bool
        Whether q, k, v, out and their gradients are (batch, heads, seqlen,
        head_dim): in `forward` and `backward` alone.
    return_max_score : bool
        Whether `forward` returns the largest scores, too, last.

    Attributes
    ----------
    tensors : dict of str to Tensor
        Those of options, and the arrays that functions read.
    moved : tuple of str
        Those that may have gradients.
    has_functions, of_batch : bool
        Whether there are functions, and whether one depends on the position
        in the batch.
    """

    __slots__ = (
        "common", "num_splits", "deterministic", "scalars", "tensors", "seed",
        "moved", "has_functions", "of_batch", "numbers", "kept", "by_heads",
        "return_max_score",
    )  # fmt: skip

    def __init__(
        self,
        scale: Any,
        causal: Any,
        block_q: Any,
        block_k: Any,
        precision: Any,
        num_splits: Any,
        deterministic: Any,
        given: dict[str, Any] | None = None,
        functions: Functions | None = None,
        by_heads: bool = False,
        return_max_score: bool = False,
    ) -> None:
        self.by_heads = by_heads
        self.return_max_score = return_max_score
        self.common = (
            "scale", scale, "causal", causal, "block_q", block_q,
            "block_k", block_k, "precision", precision,
        )  # fmt: skip
        self.num_splits = num_splits
        self.deterministic = deterministic
        self.scalars: tuple[Any, ...] = ()
        self.tensors: dict[str, torch.Tensor] = {}
        self.seed = 0
        self.moved = options.DIFFERENTIABLE
        self.has_functions = functions is not None
        self.of_batch = False
        self.numbers: tuple[Any, ...] = ()
        self.kept: Kept | None = None
        if given:
            for name in options.ARRAYS:
                if name in given:
                    self.tensors[name] = given.pop(name).resolve_neg()
            if "seed" in given:
                # Not part of the key: it differs from call to call.
                _, self.seed = scalars.numbers_of({"seed": given["seed"]})
                given["seed"] = 0
            self.scalars = tuple(x for item in given.items() for x in item)
        if functions is not None:
            self._take(functions)

    def _take(self, functions: Functions) -> None:
        """Take a user's functions and what they read."""
        graphs, self.kept = functions.graphs, functions.kept
        self.tensors |= functions.readable_arrays()
        self.moved = (*options.DIFFERENTIABLE, *graphs.moved)
        self.of_batch = graphs.of_batch
        self.numbers = tuple(functions.numbers.values())
        for item in functions.in_key().items():
            self.scalars += item

    def by_tokens(self) -> Request:
        """The same of (batch, seqlen, heads, head_dim) tensors."""
        found = copy.copy(self)
        found.by_heads = False
        return found

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_lse: Any,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> Results:
        """Out and, if wanted, lse; and max_score.

        `tensors` are the options' tensors, by default those given.
        """
        backend: Any = backend_of(q)
        if tensors is None:
            tensors = self.tensors
        own: tuple[Any, ...] = (
            *self.common, "num_splits", self.num_splits,
            "return_lse", return_lse,
        )  # fmt: skip
        if self.return_max_score:
            own = *own, "return_max_score", True
        given = {"q": q, "k": k, "v": v}
        more: Sequence[torch.Tensor] = ()
        if backend is None:
            found = self.on_cpu(api_attention.forward, given, tensors, own)
            return self._exchanged(found, 1)
        check = _forward_on(backend.target, self.by_heads)
        if self.by_heads:
            backend = backend.by_heads
        signature, launched = self.checked(check, given, tensors, own)
        if launched is not None:
            out, lse = launched.run((q, k, v), backend)
        else:
            call = self.call_of(signature, given, tensors)
            out, lse, *more = execute.forward(call, backend)
        rank = signature.rank
        if rank != 4:
            out, lse = strip(out, rank), strip_lse(lse, rank)
            more = [strip_lse(x, rank) for x in more]
        return (out, lse, *more) if return_lse else (out, *more)

    def backward(
        self,
        tensors: dict[str, torch.Tensor],
        wanted: tuple[str, ...],
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[Any, ...]:
        """The gradients of q, k, v and `moved`; None if not wanted.

        `tensors` are the options' tensors, as given to forward.
        """
        if dout is None:
            dout = torch.zeros_like(out)
        if dout.is_neg():
            dout = dout.resolve_neg()
        if dlse is not None and dlse.is_neg():
            dlse = dlse.resolve_neg()
        backend: Any = backend_of(q)
        own: tuple[Any, ...] = (
            *self.common, "deterministic", self.deterministic,
        )  # fmt: skip
        read = tuple([x for x in wanted if traced.is_named(x)])
        for name in wanted[: len(wanted) - len(read)]:
            own = (*own, f"return_d{name}", True)
        if read:
            own = (*own, *mod_tangents.gradients_of(read))
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
        if dlse is not None:
            given["dlse"] = dlse
        if backend is None:
            run = api_attention.backward
            results = self.on_cpu(run, given, tensors, own)
            results = self._exchanged(results, 3)
        else:
            check = validate.backward
            if self.by_heads:
                check, backend = by_heads(check), backend.by_heads
            call = self.call(check, given, tensors, own)
            results = execute.backward(call, backend)
            if call.rank != 4:
                first = (strip(x, call.rank) for x in results[:3])
                results = (*first, *results[3:])
        if not wanted:
            return *results, *(None,) * len(self.moved)
        others = dict(zip(wanted, results[3:], strict=True))
        return *results[:3], *map(others.get, self.moved)

    def _exchanged(self, results: Results, count: int) -> Results:
        """Results of `on_cpu`, the first ones in the order of the call."""
        if not self.by_heads:
            return results
        return *(x.transpose(1, 2) for x in results[:count]), *results[count:]

    def call(
        self,
        check: Any,
        given: dict[str, torch.Tensor],
        tensors: dict[str, torch.Tensor],
        own: tuple[Any, ...],
    ) -> Call:
        """The checked call of tensors on a CUDA device.

        `own` are names and values of the other arguments, alternating.
        """
        signature = self.checked(check, given, tensors, own)
        return self.call_of(signature, given, tensors)

    def checked(
        self,
        check: Any,
        given: dict[str, torch.Tensor],
        tensors: dict[str, torch.Tensor],
        own: tuple[Any, ...],
    ) -> Any:
        """What `signature.checked` returns of a call."""
        described = [describe(name, x) for name, x in given.items()]
        if tensors:
            described += [describe(name, x) for name, x in tensors.items()]
        return checked(check, tuple(described), *own, *self.scalars)

    def call_of(
        self,
        signature: Signature,
        given: dict[str, torch.Tensor],
        tensors: dict[str, torch.Tensor],
    ) -> Call:
        """The call that a signature is of."""
        call = Call(
            signature, given, None, traced.by_slots(tensors), self.seed,
            mod_numbers=self.numbers, kept=self.kept,
        )  # fmt: skip
        if "cu_seqlens_q" in tensors and reads_values():
            on_host = {n: x.cpu().numpy() for n, x in tensors.items()}
            host_values.offsets(Call(signature, given, None, on_host))
        return call

    def on_cpu(
        self,
        run: Any,
        given: dict[str, torch.Tensor],
        tensors: dict[str, torch.Tensor],
        own: tuple[Any, ...],
    ) -> Results:
        """The results of a function of `api` on tensors on the CPU."""
        given = given | tensors
        check_devices({name: x.device for name, x in given.items()})
        arrays = {name: to_numpy(x) for name, x in given.items()}
        if self.by_heads:
            for name in ROWS & arrays.keys():
                arrays[name] = arrays[name].swapaxes(1, 2)
        values = (*own, *self.scalars)
        others = dict(zip(values[::2], values[1::2], strict=True))
        if "seed" in others:
            others["seed"] = self.seed
        others |= mod_tangents.joined_tangents(arrays)
        names = others.pop("mod_arrays", ())
        read = {x: arrays.pop(x) for x in tensors if traced.is_named(x)}
        if read or names:
            others |= traced.of_slots(read, names, self.numbers)
        results = run(**arrays, **others)
        if not isinstance(results, tuple):
            results = (results,)
        flat: list[Any] = []
        for x in results:  # those of `mod_arrays` are a dict
            flat += x.values() if isinstance(x, dict) else [x]
        return tuple(map(from_numpy, flat))


@functools.cache
def _forward_on(target: Target, is_by_heads: bool) -> Any:
    """A check of forward calls: their signatures, and their launches if bare.

    Both by one look-up.
    """

    def found(**given: Any) -> tuple[Signature, Any]:
        signature = validate.forward(**given).signature
        return signature, execute.launched_forward(
            signature, target, target.family
        )

    return by_heads(found) if is_by_heads else found


def backend_of(x: torch.Tensor) -> Backend | None:
    """The backend of a tensor's CUDA device; None for any other.

    Nothing else in this package tells such tensors from those on the CPU.
    """
    return _cuda()(x.get_device()) if x.is_cuda else None


def kernel_backend(*tensors: torch.Tensor) -> Backend | None:
    """The backend of tensors that a kernel can read as they are, else None.

    None on the CPU, and wherever something other than reverse mode watches
    them: torch's own operations do there what is asked for.
    """
    if by_operations() or torch._C._len_torch_dispatch_stack():
        return None
    if any(
        type(x) not in PLAIN or is_batched(x) or x.is_neg() for x in tensors
    ):
        return None
    return backend_of(tensors[0])


@functools.cache
def _cuda() -> Any:
    """The function from a device's index to its backend."""
    api_arrays.on_cuda()  # tells what to install where CuPy is missing
    from .backend import backend

    return backend


def reads_values() -> bool:
    """Whether the host checks values that are on a device."""
    return settings.read("CUFLASH_CHECK") == "1"
