"""For every test run: Hypothesis profiles and the `gpu` marker.

Profiles, chosen by HYPOTHESIS_PROFILE; `ci` where CI is set, else `dev`:

ci       the same examples in every run (derandomize), so that a failure is
         due to the change under test, and kernels are compiled only once.
         `make test-all`.
quick    the same, with fewer calls drawn for the emulator (drawn.py), as
         each compiles kernels. `make test`.
dev      new examples in every run, to find new faults. A failing example is
         printed as one line to paste into a test.
nightly  many new examples, of all kernels (strategies.py): hours.
         `make fuzz-tests` runs it.

None has a deadline: the first call of a shape may compile a kernel, which
takes seconds, and the second takes microseconds.
"""

import contextlib
import gc
import os
import shutil
import tempfile
import time
from pathlib import Path

# Before NumPy is imported: pytest-xdist runs one process per core, and several
# BLAS threads in each would compete for cores (measured: ten times slower).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nor should each of those processes compile all default kernels.
os.environ.setdefault("CUFLASH_COMPILE", "lazy")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

import skips  # noqa: E402
import slow  # noqa: E402
from helpers import tried  # noqa: E402
from helpers.this_gpu import GPU, WHY_NO_GPU  # noqa: E402

# Drawing a case is cheap, but running one may include a compilation.
SLOW = [HealthCheck.too_slow]

for name in ("ci", "quick"):
    settings.register_profile(
        name,
        max_examples=6,  # most are kernels to compile, and CI has two cores
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=SLOW,
    )
settings.register_profile(
    "dev", max_examples=30, deadline=None, suppress_health_check=SLOW
)
settings.register_profile(
    "nightly",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW,
)
PROFILE = os.environ.get(
    "HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"
)
settings.load_profile(PROFILE)


def pytest_report_header(config):
    if GPU:
        return f"gpu: {GPU}"
    return f"gpu: none ({WHY_NO_GPU}); tests marked gpu are deselected"


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Collect tests without looking for garbage, a fifth of the time."""
    gc.disable()
    yield
    gc.freeze()  # nor later among what it has made
    gc.set_threshold(20_000, 10, 10)  # half of the time of the default
    gc.enable()


def pytest_ignore_collect(collection_path, config):
    """Leave folders unread all of whose tests `make test` leaves out."""
    left = config.option.markexpr == "not slow"
    return True if left and collection_path in slow.folders() else None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    """Mark slow tests and property tests; deselect what needs a GPU."""
    rules = slow.rules(slow.FILE.read_text())
    names = [item.nodeid.rpartition("tests/")[2] for item in items]
    config.stash[slow.COLLECTED] = names
    left = slow.slow_of(names, rules)
    for item, name in zip(items, names, strict=True):
        if name in left:
            item.add_marker("slow")
        if getattr(item.obj, "is_hypothesis_test", False):
            item.add_marker("property")
    if GPU:
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [i for i in items if not i.get_closest_marker("gpu")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that meets the emulator on a system without one."""
    from cuflash.errors import UnsupportedError

    try:
        return (yield)
    except UnsupportedError as error:
        if str(error).startswith(skips.ONLY_ON_LINUX):
            pytest.skip(str(error))
        raise


# Kernels emulated for new examples are not needed again: the nightly profile
# keeps none, other profiles those used within a day.
NIGHTLY = PROFILE == "nightly"
DAY = 24 * 60 * 60
if NIGHTLY:
    os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="cuflash_fuzz_")


def remove_programs(unused_for):
    """Delete emulated kernels not run for that many seconds."""
    from cuflash import folders

    folder = folders.cache_folder() / "cuflash_emulator"
    with contextlib.suppress(FileNotFoundError):  # another run was faster
        for file in os.scandir(folder):  # thousands
            name = file.name
            if file.is_dir() or "_" not in name or name.startswith("engine_"):
                continue
            used = max(file.stat().st_atime, file.stat().st_mtime)
            if time.time() - used >= unused_for:
                os.unlink(file)


def pytest_runtest_teardown():
    if NIGHTLY:
        remove_programs(unused_for=0)


def pytest_runtest_logreport(report):
    skips.note(report)


def pytest_collectreport(report):
    skips.note(report)


def pytest_terminal_summary(terminalreporter):
    for line in skips.unexpected():
        terminalreporter.write_line(f"ERROR {line}", red=True)


def pytest_sessionfinish(session):
    tried.write()
    gc.collect()
    gc.freeze()  # pytest looks for garbage five more times
    if skips.unexpected() and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if NIGHTLY:
        shutil.rmtree(os.environ["CUPY_CACHE_DIR"], ignore_errors=True)
    elif not hasattr(session.config, "workerinput"):  # xdist's workers
        remove_programs(unused_for=DAY)


@pytest.fixture(scope="session", autouse=True)
def no_tables_of_this_machine():
    """Use the package's tile tables, not those tuned on this machine."""
    from cuflash import folders

    nowhere = Path(os.devnull) / "tiles"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folders, "tile_tables", lambda: nowhere)
        yield


@pytest.fixture(scope="session")
def cp():
    """CuPy, for tests marked gpu."""
    import cupy

    return cupy
