"""A few calls of every kernel, for compute-sanitizer.

    compute-sanitizer --tool memcheck python scripts/sample_calls.py
    compute-sanitizer --tool racecheck python scripts/sample_calls.py

Small and awkward shapes: lengths that no tile divides, grouped heads,
head_dim that is padded, unequal lengths, rows that see no key, NaN.
"""

from __future__ import annotations

import argparse

import cupy
import ml_dtypes
import numpy as np

import cuflash

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
    (65, 129, 2, 2, 40, 72, True),
    (33, 97, 1, 1, 256, 256, False),
    (150, 200, 2, 1, 200, 128, True),
    (129, 64, 2, 1, 33, 7, True),
]


def draw(random: np.random.Generator, dtype: type, *shape: int):
    """Standard normal numbers on the GPU."""
    return cupy.asarray(random.standard_normal(shape).astype(dtype))


def run(dtype: type, shape: tuple, seed: int, precision: str | None) -> None:
    """Forward, backward of both kinds, and a merge, of one shape."""
    seqlen_q, seqlen_k, heads, kv_heads, d, dv, causal = shape
    random = np.random.default_rng(seed)
    q = draw(random, dtype, 2, seqlen_q, heads, d)
    k = draw(random, dtype, 2, seqlen_k, kv_heads, d)
    v = draw(random, dtype, 2, seqlen_k, kv_heads, dv)
    dout = draw(random, dtype, 2, seqlen_q, heads, dv)
    k[0, seqlen_k - 1, 0, 0] = np.nan
    v[0, seqlen_k - 1, 0, 0] = np.inf
    options = {"causal": causal, "precision": precision}
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    for deterministic in (False, True):
        options["deterministic"] = deterministic
        cuflash.backward(dout, q, k, v, out, lse, **options)
    cuflash.merge_states(out, lse, out, lse)


def run_options(dtype: type, shape: tuple, seed: int) -> None:
    """Forward and backward with masks and score steps: each, then all."""
    seqlen_q, seqlen_k, heads, kv_heads, d, dv, causal = shape
    random = np.random.default_rng(seed)
    q = draw(random, dtype, 2, seqlen_q, heads, d)
    k = draw(random, dtype, 2, seqlen_k, kv_heads, d)
    v = draw(random, dtype, 2, seqlen_k, kv_heads, dv)
    dout = draw(random, dtype, 2, seqlen_q, heads, dv)
    ids = [
        cupy.asarray(np.sort(random.integers(0, 4, (2, n), np.int32)))
        for n in (seqlen_q, seqlen_k)
    ]
    lse_dtype = np.float64 if dtype is np.float64 else np.float32
    each = [
        {"window": (50, 20)},
        {"softcap": 20.0},
        {"alibi_slopes": draw(random, np.float32, heads)},
        {"bias": draw(random, dtype, heads, 1, seqlen_k)},
        {"mask": draw(random, np.float32, seqlen_q, seqlen_k) < 1},
        {"sink": draw(random, lse_dtype, heads)},
        {"segment_ids_q": ids[0], "segment_ids_k": ids[1]},
        {"dropout": 0.25, "seed": seed},
    ]
    together = {name: x for options in each for name, x in options.items()}
    for options in (*each, together):
        options = {**options, "causal": causal}
        out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
        for name in ("bias", "sink"):
            if name in options:
                options[f"return_d{name}"] = True
        cuflash.backward(dout, q, k, v, out, lse, **options)


def run_packed(dtype: type, shape: tuple, seed: int) -> None:
    """Forward and backward of sequences of 0 tokens, 1, and many."""
    seqlen_q, seqlen_k, heads, kv_heads, d, dv, causal = shape
    random = np.random.default_rng(seed)
    q = draw(random, dtype, seqlen_q, heads, d)
    k = draw(random, dtype, seqlen_k, kv_heads, d)
    v = draw(random, dtype, seqlen_k, kv_heads, dv)
    dout = draw(random, dtype, seqlen_q, heads, dv)
    options = {"causal": causal, "window": (40, 40)}
    for name, total in (("q", seqlen_q), ("k", seqlen_k)):
        ends = [0, 0, 1, *range(10, total, 53), total - 2]
        options[f"cu_seqlens_{name}"] = np.array(ends, np.int32)
    count = min(len(options[f"cu_seqlens_{x}"]) for x in "qk")
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        options[name] = cupy.asarray(options[name][:count])
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    for deterministic in (False, True):
        cuflash.backward(
            dout, q, k, v, out, lse, **options, deterministic=deterministic
        )


def main() -> None:
    """Run every shape in every dtype asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=[*DTYPES]
    )
    arguments = parser.parse_args()
    for name in arguments.dtype:
        for seed, shape in enumerate(SHAPES):
            precision = name if name == "tf32x3" else None
            run(DTYPES[name], shape, seed, precision)
        if name != "tf32x3":
            for seed, shape in enumerate(SHAPES[:4]):
                run_options(DTYPES[name], shape, seed)
                run_packed(DTYPES[name], shape, seed)
    cupy.cuda.runtime.deviceSynchronize()
    print(f"ran {len(SHAPES)} shapes in {', '.join(arguments.dtype)}")


if __name__ == "__main__":
    main()
