"""Import times of cuflash, each in a new process.

Once with an empty cache folder, then with the one that this has filled.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

REPEATS = 5

# What a user's program does, with a clock beside it. The first call is of a
# default kernel and ends when its result is there.
PROGRAM = """
import json, time
start = time.perf_counter()
import cupy
cupy_there = time.perf_counter()
import cuflash
there = time.perf_counter()
q = cupy.ones((1, 64, 1, 64), cupy.float16)
cupy.cuda.Device().synchronize()
context_there = time.perf_counter()
cuflash.forward(q, q, q)
cupy.cuda.Device().synchronize()
end = time.perf_counter()
print(json.dumps({
    "import_cupy": cupy_there - start,
    "import_cuflash": there - cupy_there,
    "cuda_context": context_there - there,
    "first_call": end - context_there,
}))
"""


def measure() -> dict:
    """Return seconds of each step, by cache and by CUFLASH_COMPILE."""
    steps = {}
    for how in ("background", "eager"):
        with tempfile.TemporaryDirectory(
            prefix="cuflash-bench-", ignore_cleanup_errors=True
        ) as folder:
            steps[f"{how}, empty cache"] = _run(folder, how)
            # A program that ends stops what it compiles in the background,
            # so the cache is filled by one that waits.
            _run(folder, "eager")
            runs = [_run(folder, how) for _ in range(REPEATS)]
            steps[f"{how}, filled cache"] = {
                step: statistics.median(run[step] for run in runs)
                for step in runs[0]
            }
    return steps


def _run(folder: str, how: str) -> dict[str, float]:
    environment = {**os.environ, "CUPY_CACHE_DIR": folder}
    environment.pop("CUFLASH_COMPILE", None)
    if how != "background":
        environment["CUFLASH_COMPILE"] = how
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the import was to be timed, but:\n{done.stderr}")
    return json.loads(done.stdout)
