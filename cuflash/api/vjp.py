"""The public function `vjp`: forward, and backward with what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    overload,
)

from cuflash.api import foreign_names
from cuflash.api.attention import backward, forward
from cuflash.api.foreign_names import split_options
from cuflash.request.options import BY_NAME, FORWARD

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import Array, NumPyArray, VjpOptions

__all__ = ["Gradients", "Vjp", "vjp"]

_Array = TypeVar("_Array")


@dataclass(frozen=True, eq=False)
class Gradients(Generic[_Array]):
    """The gradients of a loss, by name.

    It unpacks as the result of `backward` does: ``dq, dk, dv = gradients``,
    and after `dv` those of `dbias`, `dsink` and `dmod` that are not None.

    Attributes
    ----------
    dq, dk, dv : array
        With the shapes and dtypes of `q`, `k` and `v`.
    dbias, dsink : array or None
        With the shapes and dtypes of `bias` and `sink`; None for those that
        were not given, or not asked for.
    dmod : dict of arrays, or None
        Of the arrays of `mod_arrays` that were asked for, by their names.
    """

    dq: _Array
    dk: _Array
    dv: _Array
    dbias: _Array | None = None
    dsink: _Array | None = None
    dmod: dict[str, _Array] | None = None

    def __iter__(self) -> Iterator[Any]:
        yield from (self.dq, self.dk, self.dv)
        others = self.dbias, self.dsink, self.dmod
        yield from (x for x in others if x is not None)


class Vjp(Generic[_Array]):
    """The function that `vjp` returns: from dout to the gradients.

    It holds the arrays that the backward pass needs, not copies of them, and
    can be called several times.
    """

    def __init__(
        self, given: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._given, self._options = given, options  # q, k, v, out, lse

    def __call__(
        self,
        dout: Any,
        *,
        dlse: Any = None,
        deterministic: bool = False,
        block_q: int | None = None,
        block_k: int | None = None,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        return_dbias: bool | None = None,
        return_dsink: bool | None = None,
        return_dmod: tuple[str, ...] = (),
    ) -> Gradients[_Array]:
        """The gradients of a loss whose gradient with respect to out is dout.

        Parameters
        ----------
        dout : array, like `out`
        dlse : array, like `lse`, optional
            The gradient of the loss with respect to lse.
        deterministic, block_q, block_k, dq, dk, dv
            As for `backward`.
        return_dbias, return_dsink : bool, optional
            Whether to compute these gradients; by default if `vjp` was given
            `bias` and `sink`.
        return_dmod : tuple of str, optional
            As for `backward`.

        Returns
        -------
        Gradients
        """
        wanted: dict[str, Any] = {
            "return_dbias": return_dbias,
            "return_dsink": return_dsink,
        }
        for name, is_wanted in wanted.items():
            if is_wanted is None:
                (moved,) = BY_NAME[name].needs
                wanted[name] = self._options.get(moved) is not None
        wanted["return_dmod"] = return_dmod
        found = backward(
            dout,
            *self._given,
            **self._options | wanted,
            dlse=dlse,
            deterministic=deterministic,
            block_q=block_q,
            block_k=block_k,
            dq=dq,
            dk=dk,
            dv=dv,
        )
        others = (x.removeprefix("return_") for x in wanted if wanted[x])
        names = "dq", "dk", "dv", *others
        return Gradients(**dict(zip(names, found, strict=True)))


@overload
def vjp(
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VjpOptions],
) -> tuple[NumPyArray, Vjp[NumPyArray]]: ...


@overload
def vjp(
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[VjpOptions],
) -> tuple[NumPyArray, NumPyArray, Vjp[NumPyArray]]: ...


@overload
def vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VjpOptions],
) -> tuple[Any, Vjp[Any]]: ...


@overload
def vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[VjpOptions],
) -> tuple[Any, Any, Vjp[Any]]: ...


@overload
def vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool,
    **options: Unpack[VjpOptions],
) -> tuple[Any, ...]: ...


@foreign_names.our_names("cuflash.vjp", FORWARD)
def vjp(
    q: Any,
    k: Any,
    v: Any,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """`forward`, and the function that computes its gradients.

    The vector-Jacobian product of `forward`: the arguments are given once.

    Parameters
    ----------
    q, k, v : array
        As for `forward`.
    scale, causal, precision, **options
        As for `forward`; `backward` gets them too.
    block_q, block_k, num_splits : int, optional
        As for `forward`; the returned function has `block_q` and `block_k`
        of its own.
    return_lse : bool, optional
        Whether to return `lse` too.

    Returns
    -------
    out : array, (batch, seqlen_q, num_heads_q, head_dim_v)
        As `forward` returns it.
    lse : array, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`.
    vjp : Vjp
        ``vjp(dout)`` gives the `Gradients` dq, dk, dv, and dbias and dsink
        where `bias` and `sink` are given; ``vjp(dout, dlse=dlse)`` those of a
        loss that depends on lse too, ``vjp(dout, return_dmod=names)`` those
        of arrays of `mod_arrays`. It can be called several times.

    Raises
    ------
    CuflashError
        In the same cases as `forward`.

    See Also
    --------
    forward, backward : the same in two calls.
    jvp : the derivative along a direction.

    Notes
    -----
    The returned function holds q, k, v, out, lse and the arrays among the
    options. Do not write to them before it was called: the gradients would
    be those of no forward pass.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 16, 8))
    >>> out, vjp = cuflash.vjp(q, k, v, causal=True)
    >>> gradients = vjp(np.ones_like(out))
    >>> gradients.dq.shape, gradients.dk.shape, gradients.dv.shape
    ((16, 8), (16, 8), (16, 8))
    >>> dq, dk, dv = gradients
    """
    if options or positional:
        split_options("cuflash.vjp", options, positional)
    options |= {"scale": scale, "causal": causal, "precision": precision}
    out, lse = forward(
        q,
        k,
        v,
        **options,
        block_q=block_q,
        block_k=block_k,
        num_splits=num_splits,
        return_lse=True,
    )
    pullback: Vjp[Any] = Vjp((q, k, v, out, lse), options)
    return (out, lse, pullback) if return_lse else (out, pullback)
