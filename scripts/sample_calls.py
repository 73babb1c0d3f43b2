"""Make a few calls of every kernel, for compute-sanitizer.

    compute-sanitizer --tool memcheck python scripts/sample_calls.py
    compute-sanitizer --tool racecheck python scripts/sample_calls.py

compute-sanitizer slows compilation down too: first run the script without it,
which fills the kernel cache.

The shapes are small and awkward: lengths that no tile divides, grouped heads,
padded head_dim, unequal lengths, rows that see no key, NaN.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import command_line
import cuflash
from bench_parts import machine
from cuflash import distributed

try:
    import cupy
except ImportError:  # `main` says so
    cupy = None

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "tf32x3": np.float32,
}

# (seqlen_q, seqlen_k, heads, key heads, head_dim, head_dim_v, causal)
SHAPES = [
    (200, 200, 2, 2, 64, 64, True),
    (70, 300, 4, 2, 128, 128, False),
    (300, 70, 2, 1, 128, 64, True),
    (3, 700, 10, 2, 64, 128, True),
    (65, 129, 2, 2, 40, 72, True),
    (33, 97, 1, 1, 256, 256, False),
    (150, 200, 2, 1, 200, 128, True),
    (129, 64, 2, 1, 33, 7, True),
    (45, 60, 2, 1, 512, 260, True),
]

# As above, with so many tiles that Hopper's backward divides its work in
# every way it has: a cluster for two key tiles, a block for a head, parts of
# the last key tiles, parts of a group. The longest without a mask has parts of
# keys in forward.
DIVIDED_SHAPES = [
    (300, 300, 2, 1, 256, 256, True),
    (200, 330, 2, 2, 256, 256, False),
    (500, 500, 66, 66, 64, 64, True),
    (250, 250, 66, 66, 128, 128, False),
    (1100, 1000, 4, 2, 64, 64, False),
    (3000, 1700, 6, 6, 128, 128, False),
    (3000, 2500, 6, 6, 128, 128, False),
    (6000, 6000, 16, 1, 64, 64, True),
]

# As above, with few queries, so that the decode kernels run.
DECODE_SHAPES = [
    (1, 700, 8, 1, 64, 64, False),
    (3, 530, 6, 2, 128, 128, True),
    (2, 129, 3, 3, 40, 72, True),
    (1, 70, 2, 1, 512, 260, False),
    (2, 600, 2, 1, 33, 7, True),
    (9, 300, 4, 2, 64, 128, True),
    (1, 97, 2, 1, 256, 256, False),
]
PAGE_SIZES = [1, 3, 16, 64]


def draw(random: np.random.Generator, dtype: type, *shape: int):
    """Return standard normal numbers on the GPU."""
    return cupy.asarray(random.standard_normal(shape).astype(dtype))


def inputs(
    random: np.random.Generator, name: str, shape: tuple, *batch: int
) -> list:
    """Return q, k, v and dout of a shape."""
    seqlen_q, seqlen_k, heads, kv_heads, d, dv, _ = shape
    q, k = (seqlen_q, heads), (seqlen_k, kv_heads)
    shapes = (*q, d), (*k, d), (*k, dv), (*q, dv)
    return [draw(random, DTYPES[name], *batch, *x) for x in shapes]


def precision_of(name: str) -> dict[str, str]:
    """Return the argument that selects an arithmetic that is no dtype."""
    return {"precision": name} if name == "tf32x3" else {}


def run(name: str, shape: tuple, seed: int) -> None:
    """Run forward, both kinds of backward, and a merge, of one shape."""
    q, k, v, dout = inputs(np.random.default_rng(seed), name, shape, 2)
    k[0, -1, 0, 0] = np.nan
    v[0, -1, 0, 0] = np.inf
    options = {"causal": shape[-1], **precision_of(name)}
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    for deterministic in (False, True):
        options["deterministic"] = deterministic
        cuflash.backward(dout, q, k, v, out, lse, **options)
    cuflash.merge_states(out, lse, out, lse)
    angles = draw(np.random.default_rng(seed), lse.dtype, 2, *q.shape[1::2])
    tables = angles[..., : q.shape[-1] // 2]
    for interleaved in (False, True):
        cuflash.apply_rotary(q, *tables, interleaved=interleaved)


def run_options(name: str, shape: tuple, seed: int) -> None:
    """Run forward and backward with each option alone, then with all."""
    random = np.random.default_rng(seed)
    q, k, v, dout = inputs(random, name, shape, 2)
    given = {"causal": shape[-1], **precision_of(name)}
    each = each_option(random, name, shape, seed)
    together = {name: x for options in each for name, x in options.items()}
    for options in (*each, together):
        options = {**options, **given}
        out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
        for wanted in {"bias", "sink"} & options.keys():
            options[f"return_d{wanted}"] = True
        cuflash.backward(dout, q, k, v, out, lse, **options)


def each_option(
    random: np.random.Generator, name: str, shape: tuple, seed: int
) -> list[dict[str, Any]]:
    """Return each option's arguments, for a batch of two."""
    seqlen_q, seqlen_k, heads, *_ = shape
    dtype = DTYPES[name]
    ids = [
        cupy.asarray(np.sort(random.integers(0, 4, (2, n), np.int32)))
        for n in (seqlen_q, seqlen_k)
    ]
    lse_dtype = np.float64 if dtype is np.float64 else np.float32
    return [
        {"window": (50, 20)},
        {"softcap": 20.0},
        {"alibi_slopes": draw(random, np.float32, heads)},
        {"bias": draw(random, dtype, heads, seqlen_q, seqlen_k)},
        {"bias": draw(random, dtype, heads, 1, seqlen_k)},
        {"mask": draw(random, np.float32, seqlen_q, seqlen_k) < 1},
        {"sink": draw(random, lse_dtype, heads)},
        {"segment_ids_q": ids[0], "segment_ids_k": ids[1]},
        {"dropout": 0.25, "seed": seed},
    ]


def option_sets(
    random: np.random.Generator, name: str, shape: tuple, seed: int
) -> list[dict[str, Any]]:
    """Return the arguments of a call without options, and with all."""
    given = {"causal": shape[-1], **precision_of(name)}
    each = each_option(random, name, shape, seed)
    together = {name: x for options in each for name, x in options.items()}
    return [given, {**together, **given}]


def run_derivatives(name: str, shape: tuple, seed: int) -> None:
    """Run jvp in two directions and double_backward; then with options."""
    random = np.random.default_rng(seed)
    q, k, v, dout = inputs(random, name, shape, 2)
    for options in option_sets(random, name, shape, seed):
        out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
        moving = {"q": q, "k": k, "v": v}
        moving |= {x: options[x] for x in ("bias", "sink") if x in options}
        dots = {f"{x}_dot": cupy.stack([y, y]) for x, y in moving.items()}
        cuflash.jvp(q, k, v, **dots, **options, return_lse=True)
        cotangents = {f"dd{x}": y for x, y in moving.items()}
        for wanted in {"bias", "sink"} & options.keys():
            options[f"return_d2{wanted}"] = True
        cuflash.double_backward(
            dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=lse,
            **cotangents, **options, return_ddlse=True,
        )  # fmt: skip


def run_packed(name: str, shape: tuple, seed: int) -> None:
    """Run forward and backward of sequences of 0, 1 and many tokens."""
    seqlen_q, seqlen_k, *_, causal = shape
    q, k, v, dout = inputs(np.random.default_rng(seed), name, shape)
    options = {"causal": causal, "window": (40, 40), **precision_of(name)}
    ends_q, ends_k = (
        [0, 0, 1, *range(10, total, 53), total - 2]
        for total in (seqlen_q, seqlen_k)
    )
    count = min(len(ends_q), len(ends_k))
    options["cu_seqlens_q"] = cupy.array(ends_q[:count], np.int32)
    options["cu_seqlens_k"] = cupy.array(ends_k[:count], np.int32)
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    for deterministic in (False, True):
        cuflash.backward(
            dout, q, k, v, out, lse, **options, deterministic=deterministic
        )


def run_decode(name: str, shape: tuple, seed: int) -> None:
    """Run forward with the keys in one part, in a few and in many."""
    *_, heads, _, _, _, causal = shape
    random = np.random.default_rng(seed)
    q, k, v, _ = inputs(random, name, shape, 2)
    k[0, -1, 0, 0] = np.nan
    v[0, -1, 0, 0] = np.inf
    slopes = draw(random, np.float32, heads)
    each = [{}, {"alibi_slopes": slopes, "window": (200, None)}]
    for num_splits, options in itertools.product((None, 1, 3, 128), each):
        cuflash.forward(
            q, k, v, causal=causal, **options, num_splits=num_splits,
            return_lse=True,
        )  # fmt: skip


def run_kvcache(name: str, shape: tuple, seed: int) -> None:
    """Run forward_kvcache on contiguous, paged and float8 caches."""
    random = np.random.default_rng(seed)
    q, k, v, _ = inputs(random, name, shape, 3)
    options = {"causal": shape[-1], "return_lse": True}
    lengths = random.integers(0, k.shape[1] - q.shape[1] + 1, 3, np.int32)
    lengths[0] = 0
    cuflash.forward_kvcache(q, k, v, **options)
    cuflash.forward_kvcache(q, k, v, **options, mask_mod=of_both_parities)
    options["cache_seqlens"] = cupy.asarray(lengths)
    slots = {
        "cache_batch_idx": cupy.array([2, 0, 1], np.int32),
        "cache_leftpad": cupy.array([0, 5, 40], np.int32),
    }
    growing = appended(random, name, shape, interleaved=seed % 2 == 0)
    packed = packed_queries(q, growing)
    for turn, more in enumerate(({}, growing, packed), start=seed):
        # Without num_splits, lengths decide where keys are cut.
        given = {"q": q, **options, **more, "num_splits": (None, 3)[turn % 2]}
        cuflash.forward_kvcache(k_cache=k, v_cache=v, **given, **slots)
        run_pages(random, given, k, v, PAGE_SIZES[turn % len(PAGE_SIZES)])


def appended(
    random: np.random.Generator, name: str, shape: tuple, *, interleaved: bool
) -> dict:
    """Return new tokens, as many as queries, and rotary tables."""
    seqlen_q, seqlen_k, _, heads, d, dv, _ = shape
    dtype = DTYPES[name]
    tables = draw(random, dtype, 2, seqlen_k, d // 4)
    return {
        "k_new": draw(random, dtype, 3, seqlen_q, heads, d),
        "v_new": draw(random, dtype, 3, seqlen_q, heads, dv),
        "rotary_cos": tables[0],
        "rotary_sin": tables[1],
        "rotary_interleaved": interleaved,
    }


def packed_queries(q, growing: dict) -> dict:
    """Pack queries and new tokens: of a sequence none, one, and more."""
    total = q.shape[0] * q.shape[1]
    tokens = {"q": q, "k_new": growing["k_new"], "v_new": growing["v_new"]}
    packed = {x: y.reshape(total, *y.shape[2:]) for x, y in tokens.items()}
    most = q.shape[1]  # there is room for that many in each cache
    ends = [0, 0, 1, 1 + min(most, total - 1)]
    return {**growing, **packed, "cu_seqlens_q": cupy.array(ends, np.int32)}


def run_pages(
    random: np.random.Generator, given: dict, k, v, page_size: int
) -> None:
    """Run a call with pages in the dtype of q, then with float8 pages."""
    batch, capacity, heads = k.shape[:3]
    pages = -(-capacity // page_size)
    count = batch * pages
    table = random.permutation(count).astype(np.int32)
    given = {**given, "page_table": cupy.asarray(table.reshape(batch, pages))}
    room = (count, page_size, heads)
    caches = [
        draw(random, given["q"].dtype, *room, x.shape[-1]) for x in (k, v)
    ]
    cuflash.forward_kvcache(k_cache=caches[0], v_cache=caches[1], **given)
    cuflash.forward_kvcache(
        k_cache=caches[0], v_cache=caches[1], **given,
        mask_mod=of_both_parities,
    )  # fmt: skip
    latent = {x: y for x, y in given.items() if x != "v_new"}
    columns = min(k.shape[-1], v.shape[-1])
    cuflash.forward_kvcache(k_cache=caches[0], head_dim_v=columns, **latent)
    if given["q"].dtype == np.float64:
        return  # it has no float8 caches
    for scales in ((heads,), (count, heads)):
        caches = [
            # Below 127: NaN has all bits but the sign.
            cupy.asarray(random.integers(0, 127, (*room, d), np.uint8))
            for d in (k.shape[-1], v.shape[-1])
        ]
        k_scale, v_scale = 0.01 + abs(draw(random, np.float32, 2, *scales))
        cuflash.forward_kvcache(
            k_cache=caches[0], v_cache=caches[1], k_scale=k_scale,
            v_scale=v_scale, **given,
        )  # fmt: skip


def run_shared(name: str, shape: tuple, seed: int) -> None:
    """Run two ranks, threads, that share a sequence."""
    arrays = inputs(np.random.default_rng(seed), name, shape, 2)
    # Lengths that the ranks' four chunks divide.
    q, k, v, dout = (x[:, : x.shape[1] // 4 * 4] for x in arrays)
    options = {"causal": shape[-1], **precision_of(name)}

    def of_rank(group: distributed.Group) -> None:
        parts = [distributed.shard(x, group.rank, 2) for x in (q, k, v, dout)]
        given = {**options, "group": group}
        out, lse = distributed.forward(*parts[:3], **given, return_lse=True)
        distributed.backward(parts[3], *parts[:3], out, lse, **given)

    distributed.run_threads(2, of_rank)


def run_readouts(name: str, shape: tuple, seed: int) -> None:
    """Run each readout and its gradients, plain and with all options."""
    random = np.random.default_rng(seed)
    q, k, v, _ = inputs(random, name, shape, 2)
    for options in option_sets(random, name, shape, seed):
        _, lse, _ = cuflash.forward(
            q, k, v, **options, return_lse=True, return_max_score=True
        )
        arrays = (q, k, lse)
        chosen = {"queries": [-1, 0, -1]}
        ones = cuflash.weights(*arrays, **chosen, keys=[0, -1], **options)
        cuflash.weights_backward(
            ones, *arrays, **chosen, keys=[0, -1], **options
        )
        cuflash.weights(*arrays, **options)
        for reduce in ("sum", "max"):
            asked = {**options, "reduce": reduce, "row_weights": lse}
            sums = cuflash.weight_sums(*arrays, **asked)
            cuflash.weight_sums_backward(sums, *arrays, **asked)
        entropy = cuflash.entropy(*arrays, **options)
        cuflash.entropy_backward(entropy, *arrays, **options)


def near_by_table(score, batch, head, q_idx, kv_idx, *, table):
    """A user's score, of numbers from a table."""
    return score * 1.5 + table[head, np.clip(q_idx - kv_idx + 8, 0, 16)]


def of_both_parities(batch, head, q_idx, kv_idx):
    """A user's mask, which intervals cannot decide."""
    return (q_idx + 2 * kv_idx) % 3 != 0


def run_expressions(name: str, shape: tuple, seed: int) -> None:
    """Run a user's functions, alone and with all options."""
    random = np.random.default_rng(seed)
    q, k, v, dout = inputs(random, name, shape, 2)
    table = draw(random, np.float32, q.shape[2], 17)
    functions = {"score_mod": near_by_table, "mask_mod": of_both_parities}
    functions["mod_arrays"] = {"table": table}
    for options in option_sets(random, name, shape, seed):
        options |= functions
        out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
        for deterministic in (False, True):
            cuflash.backward(
                dout, q, k, v, out, lse, **options, return_dmod=("table",),
                deterministic=deterministic,
            )  # fmt: skip


CALLS = {
    "plain": run,
    "divided": run,
    "options": run_options,
    "readouts": run_readouts,
    "expressions": run_expressions,
    "packed": run_packed,
    "derivatives": run_derivatives,
    "decode": run_decode,
    "kvcache": run_kvcache,
    "shared": run_shared,
}
SHAPES_OF = {
    "plain": SHAPES,
    "divided": DIVIDED_SHAPES,
    # Only the first ones: a shape takes some 36 kernels.
    "options": [*SHAPES[:5], SHAPES[-1]],
    "readouts": [*SHAPES[:4], SHAPES[-1]],
    "expressions": [*SHAPES[:3], SHAPES[-1]],
    "packed": SHAPES[:5],
    "derivatives": SHAPES[:5],
    "decode": DECODE_SHAPES,
    "kvcache": DECODE_SHAPES[:5],
    "shared": SHAPES,
}


def sample(names: list[str], kinds: list[str]) -> Iterator[Callable]:
    """Yield the calls of dtypes, as functions without arguments."""
    for name, kind in itertools.product(names, kinds):
        if name == "tf32x3" and kind in ("decode", "kvcache"):
            continue  # they run without it
        for seed, shape in enumerate(SHAPES_OF[kind]):
            yield functools.partial(CALLS[kind], name, shape, seed)


def main(arguments: list[str] | None = None) -> int:
    """Run the requested calls of every shape; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES])
    add("--calls", nargs="+", choices=CALLS, default=[*CALLS])
    add("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"),
        help="run the I-th of every N calls")  # fmt: skip
    options = parser.parse_args(arguments)
    first, step = options.part
    if not 0 <= first < step:
        parser.error(f"--part {first} {step}: requires 0 <= I < N")
    reason = machine.find_gpu()
    if reason is not None:
        print(
            f"sample_calls.py runs on an NVIDIA GPU and found none ({reason})."
            " Nothing was run.",
            file=sys.stderr,
        )
        return 1
    every = [*sample(options.dtype, options.calls)]
    try:
        for call in every[first::step]:
            call()
    except KeyboardInterrupt:
        return command_line.stopped("not all calls were run")
    cupy.cuda.runtime.deviceSynchronize()
    print(f"ran {len(every[first::step])} of {len(every)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
