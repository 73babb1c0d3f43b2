"""Time attention with a bias of pairs beside PyTorch and cuEquivariance.

    python scripts/bench_pairs.py
    python scripts/bench_pairs.py --seqlen 512 --dtype float32 --output x.json

`pair` is one sequence, (1, heads, seqlen, head_dim), with a bias of each
head; `triangle` has as many rows as tokens, which share the bias. Each line
is the milliseconds of forward, then of backward with the gradient of the
bias, in replayed CUDA graphs, of PyTorch's backends and of cuEquivariance's
triangle_attention where they run. All are compared with float64 before.
A backend without a backward is timed forward alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash.torch
from bench_parts import machine

DEVICE = "cuda"
HEADS = 16
BACKENDS = "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"
REPLAYS, ROUNDS = 10, 7
# Of the largest element: a product's terms and weights are rounded to 8 bits,
# or to 11 where a peer computes float32 by TF32.
BOUNDS = {"bfloat16": 2.0**-5, "float32": 2.0**-8}

Forward = Callable[..., torch.Tensor]


def by_sdpa(name: str) -> Forward:
    """torch's function by one backend; rows are its batch."""

    def forward(q: Any, k: Any, v: Any, bias: Any) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x[0] for x in (q, k, v)), attn_mask=bias[0].to(q.dtype)
            )[None]

    return forward


def contenders() -> dict[str, Forward]:
    """What there is, ours first."""
    found: dict[str, Forward] = {"cuflash": cuflash.torch.triangle_attention}
    found |= {x.partition("_")[0].lower(): by_sdpa(x) for x in BACKENDS}
    try:
        from cuequivariance_ops_torch import triangle_attention
    except (ImportError, OSError) as error:
        print(f"cuEquivariance does not run here: {error}")
    else:
        found["cuequivariance"] = triangle_attention
    return found


def inputs(rows: int, seqlen: int, d: int, dtype: torch.dtype) -> list[Any]:
    """q, k, v of one element, and the bias, which all require grad."""
    torch.manual_seed(0)
    given = {"device": DEVICE, "dtype": torch.float32}
    q, k, v = torch.randn(3, 1, rows, seqlen, HEADS, d, **given)
    bias = torch.randn(1, 1, HEADS, seqlen, seqlen, **given)
    return [
        *(x.to(dtype).transpose(2, 3).requires_grad_() for x in (q, k, v)),
        bias.requires_grad_(),
    ]


def exact(tensors: list[Any], dout: Any) -> list[Any]:
    """Results and gradients of the first row in float64.

    The bias's gradient is of that row alone.
    """
    rows = [x[:, :1].detach().double() for x in tensors[:3]]
    wide = [x.requires_grad_() for x in (*rows, tensors[3].detach().double())]
    q, k, v, bias = wide
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    out = torch.softmax(s, -1) @ v
    gradients = torch.autograd.grad(out, wide, dout[:, :1].double())
    return [out.detach(), *gradients]


def worst(
    forward: Forward, tensors: list[Any], dout: Any, has_backward: bool
) -> float:
    """The largest error in parts of the largest element, of the first row."""
    first = [*(x[:, :1].detach() for x in tensors[:3]), tensors[3].detach()]
    if has_backward:
        first = [x.requires_grad_() for x in first]
    out = forward(*first)
    got = [out.detach()]
    if has_backward:
        got += torch.autograd.grad(out, first, dout[:, :1])
    return max(
        float((x.double() - y).abs().max() / y.abs().max())
        for x, y in zip(got, exact(tensors, dout), strict=False)
    )


def runs_backward(forward: Forward, tensors: list[Any], dout: Any) -> bool:
    """Whether it has a backward; raises if it has no forward either."""
    first = [*(x[:, :1].detach() for x in tensors[:3]), tensors[3].detach()]
    forward(*first)
    try:
        first = [x.requires_grad_() for x in first]
        torch.autograd.grad(forward(*first), first, dout[:, :1])
    except RuntimeError:
        return False
    return True


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of the call, captured after three runs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def ms_of(call: Callable[[], Any]) -> float:
    """Median milliseconds of a replay."""
    replay, times = graph_of(call), []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        for _ in range(REPLAYS):
            replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / REPLAYS)
    return sorted(times)[ROUNDS // 2]


def measure(
    forward: Forward, tensors: list[Any], dout: Any, has_backward: bool
) -> tuple[float, ...]:
    """Milliseconds of forward without grad, and of backward alone."""
    detached = [x.detach() for x in tensors]
    alone = ms_of(lambda: forward(*detached))
    if not has_backward:
        return (alone,)

    def both() -> None:
        torch.autograd.grad(forward(*tensors), tensors, dout)

    return alone, ms_of(both) - alone


def cell(
    name: str, seqlen: int, d: int, dtype: str, calls: dict[str, Forward]
) -> dict[str, Any]:
    """Check, time and print one cell; returns its row of the record."""
    rows = seqlen if name == "triangle" else 1
    tensors = inputs(rows, seqlen, d, getattr(torch, dtype))
    dout = torch.randn_like(tensors[0])
    found: dict[str, Any] = {}
    for who, forward in calls.items():
        try:
            call = (
                forward,
                tensors,
                dout,
                runs_backward(forward, tensors, dout),
            )
            error = worst(*call)
            if error > BOUNDS[dtype]:
                found[who] = f"wrong by {error:.1e}"
                continue
            found[who] = [round(x, 4) for x in measure(*call)]
        except (RuntimeError, ValueError, TypeError) as problem:
            found[who] = str(problem).partition("\n")[0][:60]
        torch.cuda.empty_cache()
    times = {x: y for x, y in found.items() if isinstance(y, list)}
    ours = times.get("cuflash", [0.0, 0.0])
    words = [
        f"{who} "
        + ", ".join(
            f"{a:.3f} ({a / b:.2f})" for a, b in zip(y, ours, strict=False)
        )
        if isinstance(y, list)
        else f"{who}: {y}"
        for who, y in found.items()
    ]
    print(f"{name} {seqlen}, {HEADS} x {d}, {dtype}: " + "; ".join(words),
          flush=True)  # fmt: skip
    shape = {"name": name, "seqlen": seqlen, "head_dim": d, "dtype": dtype}
    return {**shape, "ms": found}


def main(arguments: list[str] | None = None) -> None:
    """Time all cells."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--name", nargs="+", default=["pair", "triangle"],
        choices=["pair", "triangle"])  # fmt: skip
    add("--seqlen", nargs="+", type=int, default=[512, 1024])
    add("--head-dim", nargs="+", type=int, default=[32, 64])
    add("--dtype", nargs="+", default=list(BOUNDS), choices=BOUNDS)
    add("--output", type=Path, help="a JSON file")
    given = parser.parse_args(arguments)
    calls = contenders()
    rows = [
        cell(name, seqlen, d, dtype, calls)
        for name in given.name
        for dtype in given.dtype
        for d in given.head_dim
        for seqlen in given.seqlen
    ]
    if given.output:
        record = {"machine": machine.describe(), "rows": rows}
        given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
