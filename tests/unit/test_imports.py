"""Which module imports which (the layering rules), and import times."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cuflash
import cuflash.reference

PACKAGE = Path(cuflash.__file__).parent
REFERENCE = Path(cuflash.reference.__file__).parent

# Module: the modules of cuflash that it may import. `errors` and `problem`
# import none of them, and every module may import them.
_PLANS = (
    "options problem tiles workspace plans.family plans.kernel plans.rounding"
)
LAW = {
    "_version": "",
    "_checkout": "",
    "errors": "",
    "array_types": "",
    "foreign_names": "",
    "problem": "",
    "folders": "",
    "hints": "",
    "folding": "",
    "settings": "errors",
    "abi": "options problem",
    "checks": "errors",
    "layouts": "problem",
    "softcap": "",
    "options": "checks errors layouts problem softcap",
    "validate": "checks errors hints options problem",
    "validate_derivatives": "checks errors options problem validate",
    "validate_kvcache": "checks errors options problem validate",
    "tiles": "errors folders",
    "nearest_tiles": "folders tiles",
    "plans": "",
    "plans.rounding": "",
    "plans.family": "layouts problem",
    "plans.kernel": "problem tiles workspace plans.family plans.rounding",
    "plans.steps": _PLANS,
    "plans.rotary": f"{_PLANS} plans.steps",
    "plans.append": f"{_PLANS} plans.steps",
    **{
        f"plans.{family}": f"{_PLANS} plans.steps"
        for family in ("fma", "mma", "mma8", "simt", "wgmma")
    },
    "plans.simt_derivatives": f"{_PLANS} plans.steps plans.simt",
    **{
        f"plans.{name}": f"{_PLANS} plans.steps plans.simt_derivatives"
        " plans.wgmma"
        for name in ("wgmma_jvp", "wgmma_double_backward")
    },
    "plans.mma8_derivatives": f"{_PLANS} plans.steps plans.mma8",
    "plans.fma_derivatives": f"{_PLANS} plans.steps plans.fma",
    "plans.mma_derivatives": f"{_PLANS} plans.steps plans.mma",
    "plans.partial": f"{_PLANS} plans.steps",
    "plans.decode": f"{_PLANS} plans.steps plans.append",
    "plans.decode_simt": f"{_PLANS} plans.steps plans.decode",
    "plan": f"errors settings nearest_tiles {_PLANS} plans.steps plans.decode"
    " plans.decode_simt plans.fma plans.mma plans.mma8 plans.simt"
    " plans.fma_derivatives plans.mma_derivatives plans.mma8_derivatives"
    " plans.simt_derivatives plans.wgmma plans.wgmma_jvp"
    " plans.wgmma_double_backward plans.rotary",
    "workspace": "",
    "execute": "errors settings problem options plan abi layouts"
    " workspace backends.base",
    "execute_kvcache": "errors problem options plan plans.append abi layouts"
    " workspace execute backends.base",
    "execute_derivatives": "problem options plan plans.steps abi layouts"
    " workspace execute backends.base",
    "runner": "problem execute execute_derivatives execute_kvcache"
    " backends.base",
    "build": "",
    "build.source": "abi errors",
    "build.cache": "errors folders",
    "build.nvrtc": "errors plan build.source build.cache",
    "build.warmup": "errors folders settings build.cache",
    "backends": "",
    "backends.numpy": "problem plan reference backends backends.numpy_kinds"
    " backends.numpy_derivatives backends.numpy_nan backends.numpy_parts"
    " backends.numpy_reference backends.numpy_scores backends.numpy_tiles",
    "backends.numpy_derivatives": "problem plan backends backends.numpy_kinds"
    " backends.numpy_nan backends.numpy_parts backends.numpy_reference"
    " backends.numpy_scores backends.numpy_tangents",
    "backends.numpy_kinds": "",
    "backends.numpy_flagged": "reference backends.numpy_kinds"
    " backends.numpy_scores backends.numpy_seen backends.numpy_tangents",
    "backends.numpy_nan": "reference backends.numpy_flagged"
    " backends.numpy_seen backends.numpy_tangents",
    "backends.numpy_parts": "problem reference backends.numpy_flagged"
    " backends.numpy_kinds backends.numpy_rows backends.numpy_scores"
    " backends.numpy_tangents",
    "backends.numpy_reference": "reference backends.numpy_rows"
    " backends.numpy_tangents",
    "backends.numpy_rows": "reference backends.numpy_flagged"
    " backends.numpy_scores backends.numpy_tangents",
    "backends.numpy_scores": "reference",
    "backends.numpy_seen": "reference backends.numpy_scores",
    "backends.numpy_tangents": "reference backends.numpy_scores"
    " backends.numpy_tiles",
    "backends.numpy_tiles": "reference backends.numpy_scores",
    "backends.base": "plan layouts problem",
    "backends.cupy": "errors problem plan layouts workspace abi build.nvrtc",
    "backends.emulator": "plan backends.emulator.machine",
    "backends.emulator.machine": "errors plan layouts abi"
    " build.nvrtc backends.emulator.faults backends.emulator.memory"
    " backends.emulator.runtime",
    "backends.emulator.faults": "plan backends.emulator.runtime",
    "backends.emulator.memory": "",
    "backends.emulator.runtime": "errors folders plan build.source"
    " build.cache",
    "flash_attn": "torch flash_attn.flash_attn_interface",
    "flash_attn.arguments": "checks errors torch.checks",
    "flash_attn.bert_padding": "",
    "flash_attn.dense": "torch torch.attention flash_attn.arguments",
    "flash_attn.flash_attn_interface": "flash_attn.dense"
    " flash_attn.kvcache flash_attn.varlen",
    "flash_attn.kvcache": "errors torch torch.kvcache flash_attn.arguments",
    "flash_attn.layers": "",
    "flash_attn.layers.embedding": "flash_attn.layers.functions",
    "flash_attn.layers.functions": "torch.batched_grad torch.tracing"
    " flash_attn.arguments flash_attn.rotation",
    "flash_attn.layers.rotary": "flash_attn.layers.embedding"
    " flash_attn.layers.functions",
    "flash_attn.ops": "",
    "flash_attn.ops.triton": "",
    "flash_attn.ops.triton.rotary": "flash_attn.rotation",
    "flash_attn.rotation": "errors torch.request torch.rotary"
    " torch.rotary_kernel flash_attn.arguments",
    "flash_attn.varlen": "errors torch torch.attention torch.kvcache"
    " flash_attn.arguments",
    "emulator": "backends.emulator",
    "api": "array_types foreign_names errors folders options settings"
    " problem validate"
    " validate_kvcache runner backends.base backends.numpy backends.cupy"
    " backends.emulator",
    "api_derivatives": "foreign_names api problem validate_derivatives",
    "builders": "checks errors",
    "api_vjp": "array_types foreign_names api",
    "torch": "hints torch.attention torch.fakes torch.group_attention"
    " torch.kvcache torch.merging torch.op_gradients torch.registration"
    " torch.rotary torch.sdpa",
    "torch.batched_grad": "",
    "torch.chosen_keys": "",
    "torch.eager_models": "",
    "torch.no_gradients": "errors torch.ops",
    "torch.sdpa": "checks errors torch.attention torch.checks",
    "torch.arrays": "workspace torch.dtypes",
    "torch.attention": "array_types checks errors foreign_names options"
    " torch.autocast torch.checks"
    " torch.gradients torch.ops torch.random torch.request torch.tracing"
    " torch.transforms",
    "torch.autocast": "errors",
    "torch.backend": "backends.cupy torch.arrays torch.dtypes",
    "torch.checks": "errors",
    "torch.direct": "torch.ops torch.repeated",
    "torch.dtypes": "",
    "torch.fakes": "torch.inductor torch.ops",
    "torch.derivatives": "errors torch.request torch.request_derivatives"
    " torch.batched_grad torch.vmap",
    "torch.gradients": "torch.batched_grad torch.derivatives torch.request"
    " torch.request_derivatives",
    "torch.group_attention": "api distributed errors foreign_names"
    " torch.checks torch.dtypes torch.request",
    "torch.inductor": "torch.direct",
    "torch.kvcache": "errors foreign_names problem validate_kvcache"
    " torch.autocast torch.checks torch.kvcache_ops torch.kvcache_request"
    " torch.no_gradients torch.tracing",
    "torch.kvcache_ops": "torch.fakes torch.kvcache_request"
    " torch.no_gradients torch.ops",
    "torch.kvcache_request": "api execute_kvcache problem validate_kvcache"
    " torch.dtypes torch.request torch.signature",
    "torch.masks": "torch.eager_models",
    "torch.registration": "errors torch.masks torch.transformers",
    "torch.transformers": "errors torch.attention torch.chosen_keys"
    " torch.masks",
    "torch.op_gradients": "errors torch.ops torch.tracing",
    "torch.ops": "torch.random torch.request torch.request_derivatives",
    "torch.random": "errors",
    "torch.repeated": "execute problem torch.request torch.signature",
    "torch.request": "api execute options problem settings validate"
    " backends.base torch.backend torch.batched_grad torch.dtypes"
    " torch.signature torch.tracing",
    "torch.request_derivatives": "api_derivatives problem runner"
    " validate_derivatives torch.request",
    "torch.merging": "errors execute foreign_names problem validate"
    " backends.base torch.checks torch.request torch.signature",
    "torch.rotary": "errors foreign_names problem validate torch.checks"
    " torch.dtypes torch.request torch.rotary_kernel torch.signature"
    " torch.tracing",
    "torch.rotary_kernel": "execute problem validate backends.base"
    " torch.signature",
    "torch.types": "distributed",
    "torch.signature": "errors problem settings torch.dtypes",
    "torch.tracing": "errors",
    "torch.transforms": "errors problem torch.derivatives torch.request"
    " torch.tracing",
    "torch.vmap": "folding",
    "execute_partial": "problem abi plans.partial backends.base",
    "distributed": "distributed.attention distributed.environment"
    " distributed.gathering distributed.group distributed.in_process"
    " distributed.layouts distributed.mpi distributed.nccl",
    "distributed.accumulate": "distributed.machine",
    "distributed.arguments": "api checks errors problem validate"
    " distributed.group distributed.layouts distributed.schedule",
    "distributed.arrays": "api",
    "distributed.attention": "foreign_names problem distributed.arguments"
    " distributed.group distributed.heads distributed.machine"
    " distributed.ring",
    "distributed.bench": "__init__ api errors distributed.attention"
    " distributed.environment distributed.group distributed.in_process"
    " distributed.layouts",
    "distributed.environment": "errors distributed.group distributed.mpi"
    " distributed.nccl",
    "distributed.gathering": "distributed.arrays distributed.group"
    " distributed.layouts distributed.machine",
    "distributed.group": "checks errors distributed.arrays",
    "distributed.heads": "distributed.arrays distributed.group"
    " distributed.layouts distributed.machine distributed.schedule",
    "distributed.in_process": "errors distributed.group",
    "distributed.layouts": "checks errors distributed.arrays",
    "distributed.machine": "api backends.emulator execute_partial",
    "distributed.mpi": "errors distributed.group",
    "distributed.nccl": "api errors distributed.group"
    " distributed.nccl_library distributed.watchdog",
    "distributed.nccl_library": "api errors distributed.group",
    "distributed.ring": "api distributed.accumulate distributed.arrays"
    " distributed.group distributed.machine distributed.schedule",
    "distributed.schedule": "distributed.layouts",
    "distributed.watchdog": "",
    "jax": "hints jax.attention jax.merging jax.rotary",
    "jax.arrays": "errors settings",
    "jax.merging": "foreign_names settings validate jax.arrays",
    "jax.rotary": "foreign_names problem settings validate jax.arrays",
    "jax.calls": "checks errors options plan problem validate"
    " validate_derivatives jax.arrays",
    "jax.primitives": "errors jax.arrays jax.calls",
    "jax.derivatives": "errors jax.calls jax.primitives",
    "jax.batching": "folding jax.primitives",
    "jax.cpu": "api api_derivatives jax.calls jax.primitives",
    "jax.recording": "abi layouts problem workspace backends.base jax.arrays",
    "jax.machine": "api backends.base",
    "jax.cuda": "execute options problem runner backends.base jax.arrays"
    " jax.calls jax.machine jax.primitives jax.recording",
    "jax.attention": "array_types foreign_names options problem settings"
    " validate jax.arrays jax.batching jax.calls jax.cpu jax.cuda"
    " jax.derivatives jax.primitives",
    "__init__": "errors api api_derivatives api_vjp build.warmup builders"
    " emulator reference _checkout _version",
    "__main__": "errors settings problem folders tiles plan plans.family"
    " build.cache build.nvrtc build.warmup backends.cupy"
    " backends.emulator.runtime"
    " __init__",
}
MAY_IMPORT_CUPY = {
    "backends.cupy",
    "build.nvrtc",
    "build.warmup",
    "distributed.environment",
    "distributed.nccl_library",
}
BRIDGES = ("torch", "jax")  # each imports the library of its name
ON_TOP = {"torch": ("flash_attn",)}  # bridges that stand on another
PACKAGES = (
    "backends",
    "backends.emulator",
    "build",
    "plans",
    *BRIDGES,
    "distributed",
    "flash_attn",
    "flash_attn.layers",
    "flash_attn.ops",
    "flash_attn.ops.triton",
)


class Imports(ast.NodeVisitor):
    """The dotted names that a module imports: at its top, and in functions."""

    def __init__(self, text, package):
        self.package, self.top, self.later = package, set(), set()
        self.found = self.top
        self.visit(ast.parse(text))

    def visit_FunctionDef(self, node):
        before, self.found = self.found, self.later
        self.generic_visit(node)
        self.found = before

    def visit_If(self, node):
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node):
        self.found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node):
        parts = self.package.split(".")[: -node.level + 1 or None]
        base = [*parts] if node.level else []
        base = ".".join(base + ([node.module] if node.module else []))
        packages = {"cuflash", *(f"cuflash.{name}" for name in PACKAGES)}
        if base in {self.package, *packages}:
            self.found.update(f"{base}.{a.name}" for a in node.names)
        else:
            self.found.add(base)


def modules(folder, package):
    return {
        path.stem: Imports(path.read_text(), package)
        for path in folder.glob("*.py")
    }


def all_modules():
    """The package's and those of its packages, by their names in LAW."""
    found = modules(PACKAGE, "cuflash")
    for name in PACKAGES:
        inside = modules(PACKAGE / name.replace(".", "/"), f"cuflash.{name}")
        found[name] = inside.pop("__init__")
        found |= {f"{name}.{module}": x for module, x in inside.items()}
    return found


CUFLASH = all_modules()
OF_REFERENCE = modules(REFERENCE, "cuflash.reference")


def of_cuflash(imports):
    """Names of cuflash's own modules among the imports."""
    names = set()
    for name in imports.top | imports.later:
        first, *rest = name.split(".")
        if first == "cuflash":
            own = [".".join(rest[:n]) for n in (4, 3, 2, 1)]
            known = (x for x in own if x in LAW or x == "reference")
            names.add(next(known, "__init__"))
    return names


def test_the_visitor_sees_every_form():
    text = """
from . import plan
from .errors import ShapeError
from cuflash.build import source
from cuflash.backends.emulator import runtime
from cuflash.backends.emulator.machine import Machine
import cuflash.tiles
import numpy as np
def f():
    from .reference.attention import attention
    import cupy.cuda
if TYPE_CHECKING:
    from .validate import x
"""
    imports = Imports(text, "cuflash")
    assert of_cuflash(imports) == {
        "plan", "errors", "build.source", "tiles", "reference",
        "backends.emulator.runtime", "backends.emulator.machine",
    }  # fmt: skip
    assert "numpy" in imports.top
    assert imports.later == {"cuflash.reference.attention", "cupy.cuda"}


@pytest.mark.parametrize("module", sorted(CUFLASH))
def test_a_module_imports_only_allowed_ones(module):
    assert of_cuflash(CUFLASH[module]) <= set(LAW[module].split())


def test_the_law_has_no_cycle():
    graph = {module: law.split() for module, law in LAW.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_reference_has_no_cycle():
    graph = {
        module: {
            name.split(".")[2]
            for name in imports.top | imports.later
            if name.startswith("cuflash.reference.")
        }
        for module, imports in OF_REFERENCE.items()
    }
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", sorted(OF_REFERENCE))
def test_the_reference_imports_nothing_of_cuflash(module):
    imports = OF_REFERENCE[module]
    names = imports.top | imports.later
    own = {name for name in names if name.startswith("cuflash.reference")}
    foreign = {name.partition(".")[0] for name in names - own}
    assert foreign <= {*sys.stdlib_module_names, "numpy", "scipy"}


@pytest.mark.parametrize("module", sorted(CUFLASH))
def test_cupy_is_imported_only_where_allowed(module):
    imports = CUFLASH[module]
    top, all_of_it = imports.top, imports.top | imports.later
    cupy = {"cupy", "cupyx", "cupy_backends"}
    if module not in MAY_IMPORT_CUPY:
        assert not {name.partition(".")[0] for name in all_of_it} & cupy
    if module != "backends.cupy":  # imported by the first call itself
        assert not {name.partition(".")[0] for name in top} & cupy


@pytest.mark.parametrize("module", sorted(CUFLASH))
def test_a_bridge_is_alone_with_its_library(module):
    """No other module imports a bridge, or the library of one."""
    imports = CUFLASH[module]
    first = {name.partition(".")[0] for name in imports.top | imports.later}
    for library in BRIDGES:
        above = ON_TOP.get(library, ())
        if module.partition(".")[0] not in (library, *above):
            assert library not in first
            assert not {x.partition(".")[0] for x in of_cuflash(imports)} & {
                library
            }


def run_without(blocked, text):
    """Run Python text in a process where some modules cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", block + text],
        capture_output=True,
        text=True,
    )


def test_import_and_numpy_calls_work_without_cupy_and_cuda():
    text = """
import numpy as np, cuflash
q = np.ones((3, 4), np.float32)
out, lse = cuflash.forward(q, q, q, return_lse=True)
cuflash.backward(out, q, q, q, out, lse)
cuflash.merge_states(out, lse, out, lse)
cuflash.apply_rotary(q, q[:, :2], q[:, :2])
cache = np.ones((1, 5, 1, 4), np.float32)
cuflash.forward_kvcache(cache[:, :1], cache, cache, cache_seqlens=3)
cuflash.jvp(q, q, q, q, None, None)
cuflash.double_backward(q, None, None, out, q, q, q, out, lse)
"""
    done = run_without(["cupy", "cuda"], text)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "bridge", ["torch", "jax", "flash_attn", "distributed"]
)
def test_a_bridge_that_is_not_imported_yet(bridge):
    done = run_without([], f"import cuflash; cuflash.{bridge}.attention")
    assert f"write `import cuflash.{bridge}` first" in done.stderr


@pytest.mark.parametrize(
    ("bridge", "library"),
    [*((x, x) for x in BRIDGES), ("flash_attn", "torch")],
)
def test_a_bridge_without_its_library(bridge, library):
    done = run_without([library], f"import cuflash.{bridge}")
    assert done.returncode == 1
    assert f'pip install "cuflash[{library}]"' in done.stderr.splitlines()[-1]


def test_a_cuda_array_without_cupy():
    text = """
import cuflash
class Array:
    __cuda_array_interface__ = {"data": (0, False)}
cuflash.forward(Array(), Array(), Array())
"""
    done = run_without(["cupy"], text)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "cuflash.errors.UnsupportedError: arrays on a CUDA device need CuPy, "
        'which could not be imported: pip install "cuflash[cuda13]", or '
        '"cuflash[cuda12]" for a CUDA 12 driver'
    )


CUPY_THAT_HAS_NO_FOLDER = """
import builtins
known = builtins.__import__
def without_folder(name, *more):
    if name == "cupy":
        open("/dev/null/.cupy")
    return known(name, *more)
builtins.__import__ = without_folder
"""


@pytest.mark.parametrize(
    "call", ["cuflash.forward(Array(), Array(), Array())", "warmup.gpus()"]
)
def test_cupy_without_a_cache_folder(call):
    text = f"""
import cuflash
from cuflash.build import warmup
class Array:
    __cuda_array_interface__ = {{"data": (0, False)}}
{CUPY_THAT_HAS_NO_FOLDER}
{call}
"""
    done = run_without([], text)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cuflash.errors.UnsupportedError: CuPy cannot be")
    assert "'/dev/null/.cupy'" in last and "CUPY_CACHE_DIR" in last


def test_import_is_light():
    """Without CuPy, SciPy, reference and emulator, which calls import."""
    text = "import cuflash; print(*sys.modules)"
    loaded = set(run_without([], text).stdout.split())
    assert "cuflash.api" in loaded
    assert not loaded & {"cupy", "scipy", "cuda", "cuflash.reference"}
    assert not loaded & {"torch", "jax", "transformers"}
    assert "cuflash.execute" not in loaded
    assert "cuflash.backends.emulator.machine" not in loaded
