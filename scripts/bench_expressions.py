"""Time users' expressions beside built-in options and FlexAttention.

    python scripts/bench_expressions.py
    python scripts/bench_expressions.py --rows causal softcap --head-dim 128
    python scripts/bench_expressions.py --peer none --seqlen 4096 16384
    python scripts/bench_expressions.py --output expressions.json

bfloat16, 16,384 tokens in all, heads x head_dim 2,048. Each row is a score or
a mask written as a function (docs/guide/expressions.md), the built-in option
that says the same, if there is one, and PyTorch's compiled FlexAttention. The
output of each is compared with the option's, or with plain attention of a few
rows in float64, before it is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np

import cuflash
from bench_parts import machine
from bench_parts.timing import Contender, alternate

TOKENS, WIDTH = 16384, 2048
WINDOW, CAP, DOCUMENT = 1024, 30.0, 1024


class Row(NamedTuple):
    """A variant.

    Attributes
    ----------
    score, mask : callable or None
    arrays : callable
        (batch, heads, seqlen) to `mod_arrays`, of NumPy arrays.
    option : callable or None
        The same to the built-in options that say the same.
    gradient : str
        The array whose gradient is timed too.
    """

    score: Callable | None = None
    mask: Callable | None = None
    arrays: Callable[..., dict] = lambda b, h, n: {}
    option: Callable[..., dict] | None = None
    gradient: str = ""


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def softcap(score, b, h, q_idx, kv_idx):
    return CAP * np.tanh(score / CAP)


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)


def documents(b, h, q_idx, kv_idx, *, ids):
    return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])


def alibi(score, b, h, q_idx, kv_idx, *, slopes):
    return score - slopes[h] * np.abs(q_idx - kv_idx)


def relative(score, b, h, q_idx, kv_idx, *, table):
    return score + table[h, q_idx - kv_idx]


def document_ids(batch: int, seqlen: int) -> np.ndarray:
    """Documents of about `DOCUMENT` tokens."""
    rng = np.random.default_rng(1)
    ends = rng.random((batch, seqlen)) < 1 / DOCUMENT
    return ends.cumsum(1).astype(np.int32)


def _slopes(heads: int) -> np.ndarray:
    return 2.0 ** -np.linspace(1, 8, heads).astype(np.float32)


def _table(heads: int, seqlen: int) -> np.ndarray:
    rng = np.random.default_rng(2)
    return rng.standard_normal((heads, seqlen)).astype(np.float32)


ROWS = {
    "causal": Row(
        mask=causal, option=lambda b, h, n: {"causal": True}
    ),
    "softcap": Row(softcap, option=lambda b, h, n: {"softcap": CAP}),
    "window": Row(
        mask=window,
        option=lambda b, h, n: {"causal": True, "window": (WINDOW, 0)},
    ),
    "documents": Row(
        mask=documents,
        arrays=lambda b, h, n: {"ids": document_ids(b, n)},
        option=lambda b, h, n: {
            "causal": True,
            **dict.fromkeys(
                ("segment_ids_q", "segment_ids_k"), document_ids(b, n)
            ),
        },
    ),
    "alibi": Row(
        alibi,
        causal,
        arrays=lambda b, h, n: {"slopes": _slopes(h)},
        option=lambda b, h, n: {"causal": True, "alibi_slopes": _slopes(h)},
    ),
    "relative": Row(
        relative,
        causal,
        arrays=lambda b, h, n: {"table": _table(h, n)},
        option=lambda b, h, n: {"causal": True},  # for the time alone
        gradient="table",
    ),
}  # fmt: skip
TIME_ALONE = ("relative",)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    add("--head-dim", nargs="+", type=int, default=[64, 128])
    add("--seqlen", nargs="+", type=int, default=[4096, 16384])
    add("--dtype", default="bfloat16",
        choices=["bfloat16", "float16", "float32"])  # fmt: skip
    add("--peer", choices=["flex", "none"], default="flex")
    add("--seconds", type=float, default=0.1, help="to time each")
    add("--output", type=Path, help="a JSON file")
    return parser.parse_args(arguments)


class Problem:
    """Arrays of one size, and the calls on them."""

    def __init__(self, row: Row, head_dim: int, seqlen: int, dtype: str):
        heads = WIDTH // head_dim
        self.sizes = TOKENS // seqlen, heads, seqlen
        shape = (self.sizes[0], seqlen, heads, head_dim)
        rng = cupy.random.default_rng(0)
        kind = np.dtype(dtype if dtype != "bfloat16" else _bfloat16())
        self.dout, self.q, self.k, self.v = (
            rng.standard_normal(shape, np.float32).astype(kind)
            for _ in range(4)
        )
        self.row, self.kind = row, kind
        self.arrays = {
            x: cupy.asarray(y) for x, y in row.arrays(*self.sizes).items()
        }

    def expression(self) -> dict[str, Any]:
        """The arguments of the expression."""
        found = {
            "score_mod": self.row.score, "mask_mod": self.row.mask,
            "mod_arrays": self.arrays or None,
        }  # fmt: skip
        return {x: y for x, y in found.items() if y is not None}

    def option(self) -> dict[str, Any]:
        """Those of the built-in option."""
        assert self.row.option is not None
        return {
            x: cupy.asarray(y) if isinstance(y, np.ndarray) else y
            for x, y in self.row.option(*self.sizes).items()
        }

    def calls(
        self, options: dict[str, Any], **of_gradients: Any
    ) -> tuple[Callable, Callable]:
        """The calls of forward and of backward."""
        given = self.q, self.k, self.v
        out, lse = cuflash.forward(*given, return_lse=True, **options)
        return (
            lambda: cuflash.forward(*given, return_lse=True, **options),
            lambda: cuflash.backward(
                self.dout, *given, out, lse, **options, **of_gradients
            ),
        )


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def flex_calls(problem: Problem) -> tuple[Callable, Callable]:
    """FlexAttention, compiled: forward, and backward alone."""
    import torch
    from torch.nn.attention import flex_attention as flex

    batch, _, seqlen = problem.sizes
    arrays = {x: torch.from_dlpack(y) for x, y in problem.arrays.items()}
    score, mask = torch_functions(problem.row, arrays)
    torch._dynamo.reset()
    blocks = None
    if mask is not None:
        blocks = flex.create_block_mask(
            mask, batch, None, seqlen, seqlen, device="cuda"
        )
    run = torch.compile(flex.flex_attention)

    def tensor(x: Any) -> Any:
        words = x.view(np.int16) if problem.kind.itemsize == 2 else x
        found = torch.from_dlpack(words)
        if problem.kind.itemsize == 2:
            found = found.view(getattr(torch, problem.kind.name))
        return found.transpose(1, 2)

    q, k, v, dout = map(tensor, (problem.q, problem.k, problem.v,
                                 problem.dout))  # fmt: skip
    given = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        return run(*given, score_mod=score, block_mask=blocks)

    out = forward()

    def backward() -> Any:
        return torch.autograd.grad(out, given, dout, retain_graph=True)

    torch._functorch.config.donated_buffer = False
    backward()
    forward_out = out.detach().transpose(1, 2)
    problem.flex_out = cupy.from_dlpack(forward_out.float().contiguous())
    return forward, backward


def torch_functions(row: Row, arrays: dict[str, Any]) -> tuple[Any, Any]:
    """The same variants as FlexAttention takes them: closures over tensors."""
    import torch

    score = mask = None
    if row.score is softcap:

        def score(s, b, h, i, j):
            return CAP * torch.tanh(s / CAP)
    elif row.score is alibi:
        slopes = arrays["slopes"]

        def score(s, b, h, i, j):
            return s - slopes[h] * torch.abs(i - j)
    elif row.score is relative:
        table = arrays["table"]

        def score(s, b, h, i, j):
            return s + table[h, i - j]

    if row.mask is documents:
        ids = arrays["ids"]

        def mask(b, h, i, j):
            return (i >= j) & (ids[b, i] == ids[b, j])
    elif row.mask is not None:
        mask = row.mask
    return score, mask


def check(problem: Problem, name: str) -> float:
    """The largest difference of the expression's out from another's."""
    got = cuflash.forward(problem.q, problem.k, problem.v,
                          **problem.expression())  # fmt: skip
    if name in TIME_ALONE:
        return _against_rows(problem, got)
    want = cuflash.forward(problem.q, problem.k, problem.v,
                           **problem.option())  # fmt: skip
    return _largest(got, want)


def _largest(got: Any, want: Any) -> float:
    a, b = (x.astype(np.float32) for x in (got, want))
    return float(abs(a - b).max())


def _against_rows(problem: Problem, got: Any) -> float:
    """Of 16 queries of the first batch and head, from plain attention."""
    seqlen = problem.sizes[2]
    rows = np.linspace(0, seqlen - 1, 16).astype(int)
    q, k, v = (
        x[0, :, 0].astype(np.float64)
        for x in (problem.q, problem.k, problem.v)
    )
    scores = cupy.asnumpy(q[rows] @ k.T) * q.shape[1] ** -0.5
    table = cupy.asnumpy(problem.arrays["table"])[0]
    keys = np.arange(seqlen)
    scores = scores + table[(rows[:, None] - keys) % seqlen]
    scores = np.where(rows[:, None] >= keys, scores, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    want = (p / p.sum(1, keepdims=True)) @ cupy.asnumpy(v)
    return float(abs(cupy.asnumpy(got[0, rows, 0].astype(np.float64))
                     - want).max())  # fmt: skip


def measure(
    name: str, head_dim: int, seqlen: int, given: argparse.Namespace
) -> dict[str, Any]:
    """One row's times in milliseconds."""
    problem = Problem(ROWS[name], head_dim, seqlen, given.dtype)
    found: dict[str, Any] = {"row": name, "d": head_dim, "n": seqlen}
    calls: dict[str, tuple[Any, Any]] = {}
    for kind, options in (
        ("expression", problem.expression()), ("option", problem.option()),
    ):  # fmt: skip
        start = time.perf_counter()
        calls[kind] = problem.calls(options)
        for call in calls[kind]:
            call()
        cupy.cuda.runtime.deviceSynchronize()
        found[f"{kind}_first_s"] = round(time.perf_counter() - start, 2)
    if ROWS[name].gradient:
        _, backward = problem.calls(
            problem.expression(), return_dmod=(ROWS[name].gradient,)
        )
        calls["with_gradient"] = None, backward
        calls["with_gradient"][1]()
    found["largest_difference"] = check(problem, name)
    if given.peer == "flex":
        try:
            start = time.perf_counter()
            calls["flex"] = flex_calls(problem)
            found["flex_first_s"] = round(time.perf_counter() - start, 2)
            out = cuflash.forward(problem.q, problem.k, problem.v,
                                  **problem.expression())  # fmt: skip
            found["flex_difference"] = _largest(out, problem.flex_out)
        except Exception as error:  # a peer that fails is part of the result
            found["flex"] = f"{type(error).__name__}: {str(error)[:160]}"
    for i, direction in enumerate(("forward", "backward")):
        contenders = {x: Contender([y[i]]) for x, y in calls.items() if y[i]}
        for x, y in alternate(contenders, given.seconds).items():
            found[f"{x}_{direction}_ms"] = round(y.ms, 4)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Time all rows, and print a line for each."""
    given = parse(arguments)
    lines = []
    for seqlen in given.seqlen:
        for head_dim in given.head_dim:
            for name in given.rows:
                try:
                    found = measure(name, head_dim, seqlen, given)
                except cuflash.CuflashError as error:
                    found = {"row": name, "d": head_dim, "n": seqlen,
                             "error": str(error)[:300]}  # fmt: skip
                print(json.dumps(found), flush=True)
                lines.append(found)
                cupy.get_default_memory_pool().free_all_blocks()
    if given.output:
        record = {"machine": machine.describe(), "rows": lines}
        given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
