"""Which module imports which (the layering rules), and import times."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cuflash
import cuflash.reference

PACKAGE = Path(cuflash.__file__).parent
REFERENCE = Path(cuflash.reference.__file__).parent

# Room: the rooms that its modules may import, besides their own. A room is a
# folder or a module; of several that a module is in, the innermost counts.
_BELOW_BRIDGES = (
    "errors settings request plans launch backends.base backends.cupy api"
)
LAW = {
    "_version": "",
    "_checkout": "",
    "errors": "",
    "folders": "",
    "settings": "errors",
    "diagnosis": "folders",
    "expressions": "errors",
    "request": "errors expressions",
    "plans": "errors settings folders request expressions",
    "backends.base": "request plans",
    "launch": "errors settings request plans backends.base",
    "build": "errors settings folders diagnosis plans launch",
    "backends.cupy": "errors request plans backends.base launch build",
    "backends": "errors folders request plans launch build reference",
    "backends.numpy": "settings request expressions reference",
    "emulator": "backends",
    "api": "errors settings folders diagnosis request launch backends"
    " backends.base backends.cupy backends.numpy",
    "check": "errors folders diagnosis request plans build backends api"
    " _version",
    "torch": f"{_BELOW_BRIDGES} expressions distributed",
    "jax": f"{_BELOW_BRIDGES} expressions",
    "flash_attn": "errors request torch",
    "distributed": f"{_BELOW_BRIDGES} backends expressions __init__",
    "__init__": "errors api build emulator reference _checkout _version",
    "__main__": "errors settings folders request plans build backends"
    " backends.cupy check __init__",
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
PACKAGES = [
    ".".join(path.parent.relative_to(PACKAGE).parts)
    for path in PACKAGE.rglob("*/__init__.py")
]


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


@functools.cache
def all_modules():
    """The package's modules and those of its folders, by dotted name."""
    found = modules(PACKAGE, "cuflash")
    for name in PACKAGES:
        inside = modules(PACKAGE / name.replace(".", "/"), f"cuflash.{name}")
        found[name] = inside.pop("__init__")
        found |= {f"{name}.{module}": x for module, x in inside.items()}
    return found


@functools.cache
def of_reference():
    return modules(REFERENCE, "cuflash.reference")


def first_parts(names):
    return {name.partition(".")[0] for name in names}


def of_cuflash(imports):
    """Names of cuflash's own modules among the imports."""
    names = set()
    for name in imports.top | imports.later:
        first, *rest = name.split(".")
        if first == "cuflash":
            own = [".".join(rest[:n]) for n in (4, 3, 2, 1)]
            known = (x for x in own if x in all_modules() or x == "reference")
            names.add(next(known, "__init__"))
    return names


def room_of(module):
    """The innermost room of LAW that a module is in."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((x for x in prefixes if x in LAW), module)


def test_the_visitor_sees_every_form():
    text = """
from . import api
from .errors import ShapeError
from cuflash.build import source
from cuflash.backends.emulator import runtime
from cuflash.backends.emulator.machine import Machine
import cuflash.plans.tiles
import numpy as np
def f():
    from .reference.attention import attention
    import cupy.cuda
if TYPE_CHECKING:
    from .request.validate import x
"""
    imports = Imports(text, "cuflash")
    assert of_cuflash(imports) == {
        "api", "errors", "build.source", "plans.tiles", "reference",
        "backends.emulator.runtime", "backends.emulator.machine",
    }  # fmt: skip
    assert "numpy" in imports.top
    assert imports.later == {"cuflash.reference.attention", "cupy.cuda"}


def test_modules_import_from_rooms_below_alone():
    for module, imports in all_modules().items():
        room = room_of(module)
        found = {room_of(name) for name in of_cuflash(imports)}
        assert found <= {room, *LAW[room].split()}, module


def test_neither_the_law_nor_the_modules_have_a_cycle():
    law = {room: below.split() for room, below in LAW.items()}
    modules = all_modules().items()
    found = {x: of_cuflash(imports) - {x} for x, imports in modules}
    for graph in (law, found):
        TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_reference_has_no_cycle():
    graph = {
        module: {
            name.split(".")[2]
            for name in imports.top | imports.later
            if name.startswith("cuflash.reference.")
        }
        for module, imports in of_reference().items()
    }
    TopologicalSorter(graph).prepare()


def test_the_reference_imports_nothing_of_cuflash():
    for module, imports in of_reference().items():
        names = imports.top | imports.later
        own = {x for x in names if x.startswith("cuflash.reference")}
        foreign = first_parts(names - own)
        assert foreign <= {*sys.stdlib_module_names, "numpy"}, module


def test_cupy_is_imported_only_where_allowed():
    cupy = {"cupy", "cupyx", "cupy_backends"}
    for module, imports in all_modules().items():
        if module not in MAY_IMPORT_CUPY:
            assert not first_parts(imports.top | imports.later) & cupy, module
        if module != "backends.cupy":  # imported by the first call itself
            assert not first_parts(imports.top) & cupy, module


@pytest.mark.parametrize("library", BRIDGES)
def test_a_bridge_is_alone_with_its_library(library):
    """No other module imports a bridge, or the library of one."""
    alone = library, *ON_TOP.get(library, ())
    for module, imports in all_modules().items():
        names = imports.top | imports.later | of_cuflash(imports)
        if room_of(module) not in alone:
            assert library not in first_parts(names), module


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


def test_a_bridge_that_is_not_imported_yet():
    bridges = ["torch", "jax", "flash_attn", "distributed"]
    text = f"""
import cuflash
for bridge in {bridges}:
    try:
        getattr(cuflash, bridge)
    except AttributeError as error:
        print(error)
"""
    said = run_without([], text).stdout.splitlines()
    for bridge, line in zip(bridges, said, strict=True):
        assert f"write `import cuflash.{bridge}` first" in line


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
    assert "cuflash.launch.attention" not in loaded
    assert "cuflash.backends.emulator.machine" not in loaded


def test_modules_of_request_are_at_most_450_lines():
    lengths = {
        path.name: path.read_text().count("\n")
        for path in (PACKAGE / "request").rglob("*.py")
    }
    assert not {name: n for name, n in lengths.items() if n > 450}
