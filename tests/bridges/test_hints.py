"""What messages about other libraries' arrays name exists, and takes them."""

import importlib
import inspect
import re

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
jax = pytest.importorskip("jax", reason="needs JAX")

import numpy as np  # noqa: E402

import cuflash  # noqa: E402
import cuflash.distributed  # noqa: E402
import cuflash.jax  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.request.readout import READOUTS  # noqa: E402
from helpers.compare import assert_allclose  # noqa: E402

pytestmark = pytest.mark.slow

X, LSE = np.ones((1, 3, 2, 4), np.float32), np.ones((1, 2, 3), np.float32)
TABLE = np.ones((3, 2), np.float32)
QKV = (X, X, X)
# The arrays of a call of each public function, all by position.
CALLS = {
    "apply_rotary": (X, TABLE, TABLE),
    "entropy": (X, X, LSE),
    "entropy_backward": (LSE, X, X, LSE),
    "backward": (X, *QKV, X, LSE),
    "double_backward": (*QKV, X, *QKV, X, LSE),
    "forward": QKV,
    "forward_kvcache": QKV,
    "jvp": QKV * 2,
    "merge_states": (X, LSE, X, LSE),
    "vjp": QKV,
    "weight_sums": (X, X, LSE),
    "weight_sums_backward": (LSE, X, X, LSE),
    "weights": (X, X, LSE),
    "weights_backward": (np.ones((1, 2, 3, 3), np.float32), X, X, LSE),
}


def requiring_grad(x):
    return torch.from_numpy(x).requires_grad_()


KINDS = {
    "torch": torch.from_numpy,
    "requires grad": requiring_grad,
    "jax": lambda x: jax.device_put(x, jax.devices("cpu")[0]),
}


def complaint(call, name, kind):
    function = getattr(cuflash, name)
    with pytest.raises(cuflash.UnsupportedError) as caught:
        if kind == "tracer":
            jax.jit(function)(*CALLS[name])
        else:
            function(*map(KINDS[kind], CALLS[name]))
    return str(caught.value)


def named(text):
    """The objects of PyTorch, JAX, NumPy and cuflash that a text names."""
    found = {}
    for path in re.findall(r"\b(?:cuflash|torch|jax|np)(?:\.\w+)+", text):
        if path.startswith(("torch.Tensor", "jax.jit", "jax.vmap")):
            continue  # the type of what was passed; where it was passed
        root, *rest = path.removeprefix("np.").split(".")
        at = np if path.startswith("np.") else importlib.import_module(root)
        for part in [root] * (at is np) + rest:
            at = getattr(at, part)
        found[path] = at
    return found


# Of arguments.
MAKERS = {"cu_seqlens", "rotary_tables", "segment_ids", "tile_mask"}


def test_all_functions_are_here():
    functions = [x for x in cuflash.__all__
                 if inspect.isfunction(getattr(cuflash, x))]  # fmt: skip
    assert {*functions} - MAKERS == CALLS.keys()


@pytest.mark.parametrize("kind", [*KINDS, "tracer"])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_message_names_exists(name, kind):
    text = complaint(cuflash, name, kind)
    found = named(text)  # raises AttributeError
    library = {"jax": "jax", "tracer": "jax"}.get(kind, "torch")
    ours = [x for x in found if x.startswith(f"cuflash.{library}.")]
    if name == "forward_kvcache" and "grad" in kind:
        assert not ours
    else:
        assert ours


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize(
    "name",
    ["apply_rotary", "forward", "forward_kvcache", "merge_states", *READOUTS],
)
def test_what_a_message_names_takes_the_arrays(name, library):
    text = complaint(cuflash, name, library)
    (function,) = (
        x for path, x in named(text).items() if path.startswith("cuflash")
    )
    got = function(*map(KINDS[library], CALLS[name]))
    expected = getattr(cuflash, name)(*CALLS[name])
    for x, y in zip(*map(as_tuple, (got, expected)), strict=True):
        # Sums and products of ones: a few roundings of float32.
        assert_allclose(x, y, "x", rtol=8 * 2.0**-23)


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_a_bridge_lacks(name, library):
    module = getattr(cuflash, library)
    if name in module.__all__:
        return
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as got:
        getattr(module, name)
    cure = str(got.value).partition(f"'{name}'")[2]
    assert any(x.startswith(("cuflash.", "jax.")) for x in named(cure))
    with pytest.raises(AttributeError, match="no attribute 'forwards'$"):
        _ = module.forwards


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_arrays_shared_by_ranks(kind):
    given = [KINDS[kind](x) for x in QKV]

    def of_rank(group):
        return cuflash.distributed.forward(*given, group=group)

    with pytest.raises(cuflash.UnsupportedError) as caught:
        cuflash.distributed.run_threads(1, of_rank)
    paths = [x for x in named(str(caught.value)) if x.startswith("cuflash")]
    assert paths == ["cuflash.torch.distributed_attention"] * (kind == "torch")


BRIDGED = ("attention", "apply_rotary", "merge_states")


@pytest.mark.parametrize(
    "module, kind",
    [
        (cuflash.torch, "numpy"),
        (cuflash.torch, "jax"),
        (cuflash.torch, "list"),
        (cuflash.jax, "torch"),
        (cuflash.jax, "list"),
    ],
)
@pytest.mark.parametrize("name", BRIDGED)
def test_bridges_name_what_makes_their_arrays(name, module, kind):
    make = KINDS | {"numpy": np.asarray, "list": np.ndarray.tolist}
    given = CALLS[name.replace("attention", "forward")]
    theirs = [make[kind](x) for x in given]
    with pytest.raises(cuflash.DTypeError) as caught:
        getattr(module, name)(*theirs)
    words = r"pass (torch|jax\.numpy)\.(\w+)\(\w+\)"
    library, made = re.search(words, str(caught.value)).groups()
    convert = getattr(importlib.import_module(library), made)
    getattr(module, name)(*map(convert, theirs))
