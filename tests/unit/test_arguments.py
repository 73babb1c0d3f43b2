"""The structs of a launch: common/types.cuh and arguments.py agree."""

import re

import numpy as np
import pytest

from cuflash import arguments
from cuflash.build import nvrtc, source
from helpers.kernels import small_kernel

TEXT = (source.KERNELS / "common/types.cuh").read_text()
BODIES = dict(
    re.findall(
        r"^struct (?:alignas\(64\) )?(\w+) \{(.*?)\};", TEXT, re.M | re.S
    )
)
TYPES = {
    "void*": np.uint64,
    "int": np.int32,
    "u32": np.uint32,
    "u64": np.uint64,
    "i64": np.int64,
    "double": np.float64,
    "float": np.float32,
    **vars(arguments),  # structs in structs
}


def declared(body):
    """(name, dtype) of the fields of a struct's body, in order."""
    code = re.sub(r"//.*", "", body)
    for kind, names in re.findall(r"(?:const )?([\w*]+) ([\w, [\]]+);", code):
        for name, size in re.findall(r"(\w+)(?:\[(\d+)\])?(?:, |$)", names):
            yield name, (TYPES[kind], (int(size),)) if size else TYPES[kind]


def test_each_has_the_other_s_structs():
    dtypes = {x for x, y in vars(arguments).items() if isinstance(y, np.dtype)}
    assert dtypes == set(BODIES)


@pytest.mark.parametrize("struct", BODIES)
def test_fields_have_the_names_types_and_order_of_types_cuh(struct):
    expected = np.dtype(list(declared(BODIES[struct])), align=True)
    assert getattr(arguments, struct).fields == expected.fields


def leaves(value):
    """The numbers and TensorMaps of a struct, in order."""
    if value.dtype.names is None or value.dtype == arguments.TensorMap:
        yield value
        return
    for name in value.dtype.names:
        yield from leaves(value[name])


@pytest.mark.parametrize("name", [x for x in BODIES if "Arguments" in x])
def test_a_template_lacks_maps_and_pointers_alone(name):
    struct = getattr(arguments, name)
    ones = np.frombuffer(bytes([1]) * struct.itemsize, struct)[0]
    parts = [ones, ones["arrays"]] if "arrays" in struct.names else [ones]
    constants = {
        name: part[name]
        for part in parts
        for name in part.dtype.names
        if part.dtype[name] not in (np.uint64, arguments.TensorMap)
    }
    constants.pop("arrays", None)
    kinds = [x.dtype for x in leaves(ones)]
    maps = [bytes([i]) * 128 for i in range(kinds.count(arguments.TensorMap))]
    pointers = [*range(kinds.count(np.uint64))]
    template = arguments.Template(struct, **constants)
    filled = [*leaves(np.frombuffer(template.fill(maps, pointers), struct)[0])]
    for value, one in zip(filled, leaves(ones), strict=True):
        if value.dtype == arguments.TensorMap:
            assert value.tobytes() == maps.pop(0)
        else:
            is_pointer = value.dtype == np.uint64
            expected = pointers.pop(0) if is_pointer else one
            np.testing.assert_array_equal(value, expected)
    assert not maps and not pointers


def test_the_compiler_lays_the_structs_out_like_numpy(monkeypatch):
    checks = [TEXT, "#define offsetof(s, m) __INTADDR__(&((s*)0)->m)"]
    for struct in BODIES:
        dtype = getattr(arguments, struct)
        checks.append(f"static_assert(sizeof({struct}) == {dtype.itemsize});")
        checks += [
            f"static_assert(offsetof({struct}, {name}) == {offset});"
            for name, (_, offset) in dtype.fields.items()
        ]
    assert len(checks) > 60
    monkeypatch.setattr(source, "build", lambda kernel: "\n".join(checks))
    nvrtc._compile(small_kernel(), "sm_80")  # raises CompileError
