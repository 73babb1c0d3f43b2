"""`attention` on torch tensors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch.autograd import forward_ad

from cuflash.api import foreign_names
from cuflash.api.foreign_names import split_options
from cuflash.errors import UnsupportedError
from cuflash.request import checks
from cuflash.request.options import ARRAYS, DIFFERENTIABLE, FORWARD, TRACED

from . import (
    autocast,
    compiled_functions,
    random,
    transforms,
)
from .checks import check_tensors, have_tangents
from .functions import Functions
from .gradients import Attention
from .ops import attention as by_operator
from .repeated import Numbers, request_of
from .tracing import TRANSFORMED, is_seen, is_transformed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import TorchOptions

    from .types import Results

_NAME = "cuflash.torch.attention"


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[TorchOptions],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[TorchOptions],
) -> Results: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[TorchOptions],
) -> torch.Tensor | Results: ...
@foreign_names.our_names(_NAME, FORWARD, "torch.Tensor | None")
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> torch.Tensor | Results:
    """Exact attention, softmax(scale * Q K^T) V, of torch tensors.

    Differentiable twice in `q`, `k`, `v`, `bias`, `sink` and what `score_mod`
    reads, of `out` and of `lse`, in reverse and forward mode and by
    torch.func. The derivatives are those of `cuflash.backward`, `jvp` and
    `double_backward`.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, num_heads_q, head_dim)
        On a CUDA device or the CPU: float16, bfloat16, float32 or float64.
        Any strides. 3-D is (seqlen_q, num_heads_q, head_dim), without batch,
        and 2-D is (seqlen_q, head_dim), one head: never (batch, seqlen,
        width), nor torch's order with heads before seqlen, which
        `scaled_dot_product_attention` takes.
    k, v : Tensor, (batch, seqlen_k, num_heads_kv, head_dim)
        With as many axes as `q`. `v` may have another head dimension.
    scale, causal, block_q, block_k, precision, num_splits, **options
        As for `cuflash.forward`, with tensors for arrays. `score_mod` and
        `mask_mod` may read tensors from outside, too. Without `seed`, one
        for dropout is drawn from torch's generator of the CPU, which
        `torch.manual_seed` seeds.
    return_lse : bool, optional
        Whether to return `lse` too.
    deterministic : bool, optional
        Whether the backward pass sums `dq` in a fixed order; so it does under
        `torch.use_deterministic_algorithms`, too. With its ``warn_only`` a
        bias that requires grad, which may have no fixed order, is a warning.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, num_heads_q, head_dim_v)
        In the dtype of `q`; under autocast in autocast's.
    lse : Tensor, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`: float32, float64 for float64 `q`.

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.forward`.
    ValueRangeError
        If the tensors are on several devices.
    UnsupportedError
        If another tensor than those above requires grad or has a tangent;
        for third derivatives, and forward mode over forward mode. If a tensor
        is sparse or nested.
    DTypeError
        If an argument is no tensor, or float64 under autocast.

    See Also
    --------
    cuflash.forward : the same for CuPy and NumPy arrays, with all equations.
    scaled_dot_product_attention : the same in torch's layout and signature.

    Examples
    --------
    >>> import torch
    >>> import cuflash.torch
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8, requires_grad=True)
    >>> out = cuflash.torch.attention(q, k, v, causal=True)
    >>> out.shape
    torch.Size([2, 16, 4, 8])
    """
    given = own = None
    program: Any = None
    arrays: dict[str, Any] = {}
    if options or positional:
        plain, arrays = split_options(_NAME, options, positional)
        if not TRACED.isdisjoint(plain):
            own, program = compiled_functions.own_or_program(plain, arrays, q)
        given = plain | arrays
    numbers = scale, causal, block_q, block_k, precision, num_splits
    return attend(
        q, k, v, return_lse, numbers, deterministic, given, arrays, own,
        program,
    )  # fmt: skip


_NUMBERS = (
    "scale", "causal", "block_q", "block_k", "precision", "num_splits",
)  # fmt: skip


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: Any,
    numbers: Numbers,
    deterministic: Any = False,
    given: dict[str, Any] | None = None,
    arrays: dict[str, torch.Tensor] | None = None,
    own: Functions | None = None,
    program: Any = None,
    by_heads: bool = False,
    return_max_score: bool = False,
) -> Any:
    """`attention`, whose options are taken apart.

    Parameters
    ----------
    q, k, v, return_lse, deterministic
    numbers : tuple
        The arguments of `_NUMBERS`.
    given, arrays : dict or None
        The options, and the tensors among them.
    own : Functions or None
        A user's.
    program : tuple or None
        The same, as an operator takes them, in code that is compiled.
    by_heads : bool, optional
        Whether q, k, v and out are (batch, heads, seqlen, head_dim).
    return_max_score : bool, optional
        Whether the largest scores are returned too, last: no gradient reaches
        them.
    """
    if torch.are_deterministic_algorithms_enabled():
        bias = given.get("bias") if given else None
        deterministic = deterministic or not _only_warns(bias)
    # Compiled code checks each name that it has read again at each call: here
    # it reads as few as it can.
    compiling = torch.compiler.is_compiling()
    transformed = False
    if compiling:
        # Dynamo may begin here, with `own`.
        if is_transformed(program is not None or own is not None):
            return _in_eager_mode(
                program, (q, k, v, return_lse, numbers, deterministic, given),
                arrays=arrays, own=own, by_heads=by_heads,
                return_max_score=return_max_score,
            )  # fmt: skip
        to_cast = torch.is_autocast_enabled(q.device.type)
    else:
        inputs = {"q": q, "k": k, "v": v}
        if arrays:
            inputs |= arrays
        if own is not None:
            inputs |= own.arrays
        check_tensors(inputs)
        to_cast = torch._C._is_any_autocast_enabled() and autocast.is_on(q)
        transformed = torch._C._are_functorch_transforms_active() or (
            forward_ad._current_level >= 0 and have_tangents(inputs)
        )
    if return_max_score and transformed:
        raise UnsupportedError(
            "return_aux asks for max_scores in forward mode or inside a"
            " transform of torch.func, expected lse alone there"
        )
    if to_cast:
        q, k, v, given = autocast.cast(q, k, v, given)
    traced = compiling or (not transformed and is_seen(q, k, v))
    if by_heads and (traced or transformed):
        others = numbers, deterministic, given, arrays, own, program, False
        return _by_views(q, k, v, return_lse, *others, return_max_score)
    with_grad = False
    if (given or not compiling) and not transformed:
        with_grad = torch.is_grad_enabled() and needs_grad(q, k, v, given, own)
    if traced:
        if own is not None:
            program = own.as_program()
        named = dict(zip(_NUMBERS, numbers, strict=True))
        return by_operator(
            q, k, v, return_lse, given, program, return_max_score,
            deterministic=deterministic, **named,
        )  # fmt: skip
    if given and given.get("dropout") and "seed" not in given:
        given["seed"] = _seed_of(transformed)
    request = request_of(
        numbers, deterministic, given, own, by_heads, return_max_score
    )
    if not (transformed or with_grad):
        found = request.forward(q, k, v, return_lse)
        return found if return_lse or return_max_score else found[0]
    wanted = checks.flag("return_lse", return_lse)
    if transformed:
        return transforms.attention(request, wanted, q, k, v)
    moved = map(request.tensors.get, request.moved)
    return Attention.apply(request, wanted, q, k, v, *moved)


@torch.compiler.disable(reason=TRANSFORMED)
def _in_eager_mode(program: Any, given: tuple[Any, ...], **named: Any) -> Any:
    """`attend`, which Dynamo leaves as it is."""
    if program is not None:
        named["own"] = Functions.of_program(*program)
    return attend(*given, **named)


def _by_views(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any
) -> Any:
    """`attend` of tensors by heads as views by tokens."""
    found = attend(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *others
    )
    if isinstance(found, tuple):
        return found[0].transpose(1, 2), *found[1:]
    return found.transpose(1, 2)


def _seed_of(transformed: bool) -> int:
    """A seed that is drawn for a call."""
    if transformed and torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "dropout is given without seed inside a transform of "
            "torch.func, expected seed too: no seed is drawn there"
        )
    return random.draw()


def _only_warns(bias: torch.Tensor | None) -> bool:
    """Whether torch warns of a bias whose gradient may have no fixed order."""
    # A compiler does not know whether torch only warns.
    if bias is None or torch.compiler.is_compiling():
        return False
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if bias.requires_grad:
        warnings.warn(
            "bias requires grad: cuflash sums the gradients of this call in "
            "no fixed order (pass deterministic=True unless bias is "
            "broadcast)",
            stacklevel=3,
        )
    return bias.requires_grad


def needs_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: dict[str, Any] | None,
    own: Functions | None = None,
) -> bool:
    """Whether an input requires grad; UnsupportedError if one may not."""
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    if not wanted and own is not None and own.graphs.moved:
        moved = (own.arrays[x] for x in own.graphs.moved)
        wanted = any(x.requires_grad for x in moved)
    if not given:
        return wanted
    for name in ARRAYS:
        if name in given and given[name].requires_grad:
            if name not in DIFFERENTIABLE:
                raise UnsupportedError(
                    f"{name} requires grad, expected a tensor that does not: "
                    "attention is differentiable in q, k, v, "
                    f"{', '.join(DIFFERENTIABLE)} and lse only (pass "
                    f"{name}.detach())"
                )
            wanted = True
    return wanted
