"""Time cuflash.torch next to PyTorch's own attention.

    python scripts/bench_torch.py                # all of it
    python scripts/bench_torch.py --only host    # host time a call
    python scripts/bench_torch.py --only llama   # a training step
    python scripts/bench_torch.py --rounds 30 --json record.json

Host time: calls that the GPU finishes sooner than the host starts them, so
that the time of many is the host's. Contenders alternate; the table has the
median of the rounds, and the smallest in brackets. Both first compute the
same numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line

SHAPE = {"batch": 2, "seqlen": 64, "heads": 16, "heads_kv": 4, "head_dim": 64}
TOKENS = (2, 2048)  # of the Llama: batch, seqlen
CALLS = 200  # of a round

# The largest ratio to SDPA's time that is wanted.
LIMITS = {
    "forward": 1.5,
    "forward + backward": 1.05,
    "forward, compiled": 1.0,
    "forward + backward, compiled": 1.0,
    "Llama step": 1.02,
    "Llama step, compiled": 1.0,
}

Calls = dict[str, Callable[[], Any]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
    )
    add = parser.add_argument
    add("--only", choices=["host", "llama"], help="one of the parts")
    add("--rounds", type=command_line.number, default=15)
    add("--no-compile", action="store_true", help="eager calls only")
    add("--json", type=Path, help="a file for the numbers")
    return parser.parse_args(arguments)


def why_not() -> str | None:
    """Why nothing can be timed here, None if it can."""
    try:
        import torch
    except ImportError:
        return 'PyTorch is not installed: pip install "cuflash[torch]"'
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU on this machine"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return 'CuPy is not installed: pip install "cuflash[cuda13]"'
    return None


# Contenders ---------------------------------------------------------------


def attentions() -> dict[str, Callable[..., Any]]:
    """Causal attention of (batch, seqlen, heads, head_dim) tensors."""
    import torch

    import cuflash.torch

    def ours(q: Any, k: Any, v: Any) -> Any:
        return cuflash.torch.attention(q, k, v, causal=True)

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2)

    return {"cuflash": ours, "SDPA": sdpa}


def inputs(requires_grad: bool) -> list[Any]:
    """q, k, v and the gradient of out."""
    import torch

    n, made = SHAPE, []
    for heads in ("heads", "heads_kv", "heads_kv", "heads"):
        shape = (n["batch"], n["seqlen"], n[heads], n["head_dim"])
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        made.append(x.requires_grad_(requires_grad))
    made[-1].requires_grad_(False)
    return made


def host_calls(compiled: bool) -> dict[str, Calls]:
    """What is timed by the host's clock: by name, then by contender."""
    import torch

    q, k, v, dout = inputs(requires_grad=True)
    plain = inputs(requires_grad=False)[:3]
    # SDPA reads heads before seqlen: in its calls the tensors lie so, too.
    by_heads = [lay_by_heads(x) for x in (q, k, v)]
    own = {
        "cuflash": ((q, k, v), plain),
        "SDPA": (by_heads, [lay_by_heads(x) for x in plain]),
    }
    forward: Calls = {}
    backward: Calls = {}
    for name, attention in attentions().items():
        function = attention
        if compiled:
            function = torch.compile(attention, fullgraph=True)
        leaves, no_grad = own[name]

        def run(function: Any = function, given: Any = no_grad) -> Any:
            return function(*given)

        def train(function: Any = function, given: Any = leaves) -> Any:
            for x in given:
                x.grad = None
            function(*given).backward(dout)
            return [x.grad for x in given]

        forward[name], backward[name] = run, train
    more = ", compiled" if compiled else ""
    return {f"forward{more}": forward, f"forward + backward{more}": backward}


def lay_by_heads(x: Any) -> Any:
    """The same numbers, where a head's tokens lie side by side."""
    y = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    return y.requires_grad_(x.requires_grad)


def llama_steps(compiled: bool) -> dict[str, Calls]:
    """A training step of a Llama, by contender."""
    import torch

    from bench_parts.torch_llama import VOCABULARY, Llama

    tokens = torch.randint(VOCABULARY, TOKENS, device="cuda")
    steps: Calls = {}
    for name, attention in attentions().items():
        torch.manual_seed(0)
        model = Llama(attention, TOKENS[1]).to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        function = torch.compile(model, fullgraph=True) if compiled else model

        def step(function: Any = function, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss = function(tokens)
            loss.backward()
            optimizer.step()
            return loss

        steps[name] = step
    return {"Llama step, compiled" if compiled else "Llama step": steps}


# Times --------------------------------------------------------------------


def alternate(calls: Calls, rounds: int, count: int) -> dict[str, list[float]]:
    """Microseconds a call, of each round, from an idle GPU to an idle one."""
    import torch

    for call in calls.values():
        for _ in range(max(3, count // 4)):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
            times[name].append(elapsed / count * 1e6)
    return times


def gpu_time(call: Callable[[], Any], count: int) -> float:
    """Microseconds a call takes on the GPU, by a CUDA graph of calls."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / count


def check(name: str, calls: Calls) -> None:
    """Raise if contenders differ by more than bfloat16 explains."""
    import torch

    results = [call() for call in calls.values()]
    ours, theirs = (x if isinstance(x, list) else [x] for x in results)
    for x, y in zip(ours, theirs, strict=True):
        size = float(y.float().abs().max())
        error = float((x.float() - y.float()).abs().max())
        # A few roundings to 8 bits of what is as large as the largest.
        if error > 4 * torch.finfo(torch.bfloat16).eps * size:
            raise SystemExit(
                f"bench_torch: {name}: results differ by {error:.3g}, the "
                f"largest is {size:.3g}"
            )


def row(name: str, times: dict[str, list[float]]) -> str:
    """A line of the table."""
    ours, theirs = (statistics.median(x) for x in times.values())
    least = " · ".join(f"{min(x):.1f}" for x in times.values())
    limit = LIMITS[name]
    verdict = "" if ours <= limit * theirs else "  ABOVE"
    return (
        f"{name:30} {ours:10.1f} {theirs:10.1f} {ours / theirs:7.3f} "
        f"{limit:6.2f}{verdict}  [{least}]"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse(arguments)
    reason = why_not()
    if reason:
        print(f"bench_torch: nothing timed: {reason}")
        return 0
    import torch

    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print(f"{'us a call':30} {'cuflash':>10} {'SDPA':>10}   ratio  limit")
    record: dict[str, Any] = {}
    for compiled in [False] if options.no_compile else [False, True]:
        parts: dict[str, tuple[Callable[[bool], dict[str, Calls]], int]] = {
            "host": (host_calls, CALLS),
            "llama": (llama_steps, 5),
        }
        for part, (make, count) in parts.items():
            if options.only not in (None, part):
                continue
            for name, calls in make(compiled).items():
                check(name, calls)
                times = alternate(calls, options.rounds, count)
                record[name] = times
                print(row(name, times), flush=True)
    if options.only != "llama":
        forward = host_calls(False)["forward"]
        print("On the GPU, forward:", end="")
        for name, call in forward.items():
            record[f"GPU {name}"] = gpu_time(call, 20)
            print(f" {name} {record[f'GPU {name}']:.1f} us", end="")
        print()
    if options.json:
        options.json.write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
