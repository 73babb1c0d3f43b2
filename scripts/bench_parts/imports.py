"""Import times of cuflash, each in a new process.

Once with an empty cache folder, then with the folder that the first filled.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

REPEATS = 5

# A user's program, timed. The first call runs a default kernel and ends when
# the result is complete.
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
    """Return the seconds of each step, by CUFLASH_COMPILE and cache."""
    steps = {}
    for how in ("background", "eager"):
        with tempfile.TemporaryDirectory(
            prefix="cuflash-bench-", ignore_cleanup_errors=True
        ) as folder:
            steps[f"{how}, empty cache"] = _run(folder, how)
            # A program that exits stops its background compilation, so a
            # program that waits for it fills the cache.
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
        raise SystemExit(f"the timed import failed:\n{done.stderr}")
    return json.loads(done.stdout)
