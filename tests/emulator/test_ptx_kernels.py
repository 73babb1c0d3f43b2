"""The kernels that test primitives: all compile, all of ptx.cuh is used."""

import itertools
import re

import pytest

from cuflash.build import nvrtc
from cuflash.build.source import KERNELS
from cuflash.plans.plan import KernelPlan
from helpers.small_kernels import KERNELS as FOLDER

FILES = {x.stem: x for x in sorted((FOLDER / "primitives").glob("*.cu"))}
TEXTS = {name: path.read_text() for name, path in FILES.items()}
# Values of what a kernel's header calls its constants.
VALUES = {
    "Element": ("float16", "bfloat16"),
    "T": ("float", "double"),
    "PARTLY": (False, True),
    "TRANSPOSED": (False, True),
    "WARP": (False, True),
    "COLUMNS": (32, 256),
    "REGISTERS": (False, True),
    "SIGN": (1,),
    "A_TRANSPOSED": (False, True),
    "B_TRANSPOSED": (False, True),
    "ROWS": (16,),
    "NUM_THREADS": (384,),
    "BLOCKS_PER_SM": (1,),
    "CLUSTER_BLOCKS": (2,),
    "FEWER": (24,),
    "MORE": (240,),
}


def kernels(name):
    """Yield a file's kernel with each combination of its constants."""
    named = re.search(r"Constants: ([\w, ]+)\.", TEXTS[name])
    names = named[1].split(", ") if named else []
    for values in itertools.product(*(VALUES[x] for x in names)):
        constants = tuple(zip(names, values, strict=True))
        yield KernelPlan(str(FILES[name]), name, constants, 32, 0)


CASES = [
    (name, arch)
    for name in FILES
    for arch in ("sm_80", "sm_90a", "sm_120")
    if arch == "sm_90a" or "on sm_90a" not in TEXTS[name]
]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_a_kernel_of_a_primitive_compiles(name, arch):
    for kernel in kernels(name):
        report = nvrtc.report(kernel, arch)
        assert report.spill_bytes == 0 and not report.warnings


def test_every_function_of_ptx_is_tested():
    ptx = (KERNELS / "common/ptx.cuh").read_text()
    defined = re.findall(r"__forceinline__ [\w ]+?(\w+)[(<]", ptx)
    code = re.sub(r"//.*", "", " ".join(TEXTS.values()))
    used = set(re.findall(r"\w+", code))
    assert {"pack", "cp_async_wait", "wgmma_shared"} <= set(defined)
    assert set(defined) <= used
