"""Names of arguments: signatures, and keywords that a call does not have.

`TABLE` holds the arguments of other libraries' attention; a test compares it
with docs/guide/migrating.md.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cuflash.api.tile_mask import function_of
from cuflash.request import options as table

__all__ = ["TABLE", "our_names", "refuse", "split_options", "unexpected"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# By their names: our arguments, of which the first that the call has is named,
# and what to know.
_CAUSAL = "aligned at the end: the last query sees the last key"
_SEED = "which requires seed, but for torch tensors"
_NONE = ""
TABLE: dict[str, tuple[tuple[str, str], ...]] = {
    "query": (("q", "(batch, seqlen, heads, head_dim)"),),
    "key": (("k", "(batch, seqlen, heads, head_dim)"),),
    "value": (("v", "(batch, seqlen, heads, head_dim)"),),
    "qkv": (("q", "k and v, such as q=qkv[:, :, 0]: views are not copied"),),
    "kv": (("k", "and v, such as k=kv[:, :, 0]: views are not copied"),),
    "is_causal": (("causal", _CAUSAL),),
    "attn_mask": (
        (
            "mask",
            "if it is boolean, True where a query sees a key; bias, if it is "
            "added to the scores",
        ),
    ),
    "attn_bias": (
        ("bias", "if it is an array; causal, window or cu_seqlens_q, if not"),
    ),
    "dropout_p": (("dropout", _SEED),),
    "p": (("dropout", _SEED),),
    "softmax_scale": (("scale", "head_dim ** -0.5 by default"),),
    "enable_gqa": (
        (
            _NONE,
            "grouped heads need no argument: num_heads_q is a multiple of "
            "num_heads_kv",
        ),
    ),
    "window_size": (
        ("window", "(left, right) with None for -1: (256, -1) is (256, None)"),
    ),
    "local_window_size": (
        ("window", "(left, right), aligned at the end"),
    ),
    "return_attn_probs": (
        (
            "return_lse",
            "the weights are never stored: cuflash.weights computes those of "
            "some queries",
        ),
    ),
    "return_softmax_lse": (("return_lse", ""),),
    "return_residual": (("return_lse", "(batch, heads, seqlen)"),),
    "block_table": (
        ("page_table", ""),
        (_NONE, "pages are for cuflash.forward_kvcache(..., page_table=...)"),
    ),
    "k": (("k_new", "the keys to append"),),
    "v": (("v_new", "the values to append"),),
    "interleaved": (("rotary_interleaved", ""),),
    "rotary_interleaved": (("interleaved", ""),),
    "block_mask": (("mask_mod", "each call finds its tiles"),),
    "kernel_options": (("block_q", "and block_k"),),
    "query_seq_lengths": (
        ("cu_seqlens_q", "of packed sequences, or segment_ids_q"),
    ),
    "key_value_seq_lengths": (
        ("cu_seqlens_k", "of packed sequences, or segment_ids_k"),
        ("cache_seqlens", ""),
    ),
    "implementation": (
        (_NONE, "the arrays' device decides which code runs"),
    ),
    "stream": (
        (
            _NONE,
            "a call runs on the current stream: write 'with stream:' around "
            "it, or torch.cuda.stream(stream) for cuflash.torch",
        ),
    ),
    "op": ((_NONE, "the kernel is chosen by dtype and device"),),
    "output_dtype": ((_NONE, "out has the dtype of q"),),
    "out_b": (("more", "without a name: out_a, lse_a, out_b, lse_b, ..."),),
    "lse_b": (("more", "without a name: out_a, lse_a, out_b, lse_b, ..."),),
}  # fmt: skip

_PARAMETERS: dict[str, tuple[str, ...]] = {}  # by call
_OPTIONS: dict[str, frozenset[str]] = {}  # those passed as one mapping
_UNNAMED: dict[str, int] = {}  # how many of them need no name


def our_names(
    call: str,
    options: tuple[str, ...] = (),
    array: str = "Any",
    like: Callable[..., Any] | None = None,
    without: tuple[str, ...] = (),
) -> Callable[[_Function], _Function]:
    """A decorator for a public call with ``*positional`` and ``**options``.

    In the signature, which help() and editors show, it hides the first and
    spells out the second; so it does in the docstring's entry
    ``..., **options``. The call raises `unexpected` for names that it does
    not have: a wrapper would take time.

    Parameters
    ----------
    call : str
        Its name, for messages.
    options : tuple of str
        The names in the option table that it takes as ``**options``.
    array : str
        The type of an array option.
    like : callable, optional
        A call whose keywords this one takes as ``**options``, in place of
        options of the table. Those that both have are this call's own.
    without : tuple of str, optional
        Keywords of `like` that this call does not have.
    """

    def register(function: _Function) -> _Function:
        signature = inspect.signature(function)
        hidden = "positional", "unknown", "options"
        own = {
            name: x
            for name, x in signature.parameters.items()
            if name not in hidden
        }
        first, taken = own, {x: _parameter(x, array) for x in options}
        if like is not None:  # in its order
            first = {x: y for x, y in own.items() if y.kind != y.KEYWORD_ONLY}
            taken = _keywords(like, array)
            for name in without:
                del taken[name]
        known = first | taken | own
        _PARAMETERS[call] = tuple(known)
        passed = [x for x in taken if x not in own]
        _OPTIONS[call] = frozenset(passed)
        _UNNAMED[call] = sum(
            x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            for x in known.values()
        )
        shown = signature.replace(parameters=[*known.values()])
        function.__signature__ = shown  # type: ignore[attr-defined]
        function.__annotations__.pop("options", None)
        function.__doc__ = _with_names(function.__doc__ or "", passed)
        return function

    return register


def _parameter(name: str, array: str) -> inspect.Parameter:
    option = table.BY_NAME[name]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=option.hint or array,
    )


def _keywords(
    like: Callable[..., Any], array: str
) -> dict[str, inspect.Parameter]:
    """The keywords of a call, for arrays of another type."""
    return {
        name: x.replace(annotation=array) if x.annotation == "Any" else x
        for name, x in inspect.signature(like).parameters.items()
        if x.kind is x.KEYWORD_ONLY
    }


def _with_names(text: str, options: list[str]) -> str:
    """A docstring whose entry ``..., **options`` names all but gradients."""
    before, mark, after = text.partition(", **options\n")
    if not mark:
        return text
    before, _, entry = before.rpartition("\n")
    gradients = {x.name for x in table.TABLE if x.of_gradients}
    names = [x for x in options if x not in gradients]
    entry = textwrap.fill(
        ", ".join([entry, *names]), 79, subsequent_indent="    "
    )
    return "\n".join((before, *entry.split(",\n"), after))


def split_options(
    call: str, given: Mapping[str, Any], positional: tuple[Any, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``**options`` of a call that are not absent: `options.split`.

    Raises
    ------
    TypeError
        See `unexpected`.
    """
    refuse(call, given, positional)
    return table.split(function_of(given))


def refuse(
    call: str, given: Mapping[str, Any], positional: tuple[Any, ...] = ()
) -> None:
    """Raise `unexpected` for ``**options`` that a call does not have."""
    known = _OPTIONS[call]
    if positional or not known.issuperset(given):
        unknown = {x: given[x] for x in given if x not in known}
        raise unexpected(call, unknown, positional)


def unexpected(
    call: str, unknown: Mapping[str, Any], positional: tuple[Any, ...] = ()
) -> TypeError:
    """The error of a call with arguments that it does not have.

    Parameters
    ----------
    call : str
        As given to `our_names`.
    unknown : mapping of str to object
    positional : tuple
        Arguments without a name after those that may have none.
    """
    if positional:
        count, names = _UNNAMED[call], _PARAMETERS[call]
        return TypeError(
            f"{call}() takes {count} arguments without a name "
            f"({', '.join(names[:count])}), got {count + len(positional)}: "
            f"name the others, such as {names[count]}=..."
        )
    name = next(iter(unknown))
    cure = _cure(call, name)
    return TypeError(
        f"{call}() got an unexpected keyword argument {name!r}"
        f"{': ' * bool(cure)}{cure}"
    )


def _cure(call: str, name: str) -> str:
    known = _PARAMETERS[call]
    for ours, note in TABLE.get(name, ()):
        if ours in known:
            return f"write {ours}{', ' * bool(note)}{note}"
        if ours == _NONE:
            return note
    if name in known:
        return "pass its arrays without a name"
    others = [x for x, names in _PARAMETERS.items() if name in names]
    if others:
        own = f"{call}_backward"
        return f"it is an argument of {own if own in others else others[0]}"
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else ""
