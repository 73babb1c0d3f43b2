"""apply_rotary: rotary position embedding, against the reference."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

import cuflash
import strategies
from cuflash.launch import rows
from cuflash.reference import rotary
from cuflash.request.validate import rotary as validate
from helpers.backends import EMULATED, on_backends
from helpers.compare import (
    Expected,
    assert_all,
    assert_bitwise,
    assert_finite,
    assert_matches,
)
from helpers.data import LAYOUTS, Case, inputs
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES, PRECISION, lse_dtype

dtypes = pytest.mark.parametrize("dtype", DTYPES)
POSITIONS = 40


@dataclass
class Call:
    """x, the tables, and the other arguments of a call."""

    x: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    given: dict

    @classmethod
    def of(cls, case, rotary_dim=None, **given):
        """Draw what is not given from the case's seed."""
        rng = np.random.default_rng(case.seed)
        x = inputs(case)[0]
        if rotary_dim is None:
            rotary_dim = 2 * rng.integers(0, case.head_dim // 2 + 1)
        own = lse_dtype(x.dtype) if rng.random() < 0.5 else x.dtype
        tables = [x.astype(own) for x in rotary.tables(POSITIONS, rotary_dim)]
        shapes = [x.shape[:2], x.shape[1:2], (x.shape[0], 1), (1,), None]
        shape = shapes[rng.integers(len(shapes))]
        if shape is not None and "positions" not in given:
            kind = rng.choice([np.int32, np.int64])
            given["positions"] = rng.integers(0, POSITIONS, shape, kind)
        for name in ("interleaved", "inverse"):
            given.setdefault(name, bool(rng.random() < 0.5))
        return cls(x, *tables, given)

    def run(self, backend, case, **more):
        """Return the result as a NumPy array."""
        backend.poison()
        arrays = {
            name: backend.place(x) if isinstance(x, np.ndarray) else x
            for name, x in self.given.items()
        }
        placed = [backend.place(x) for x in (self.x, self.cos, self.sin)]
        with backend.running(case):
            got = cuflash.apply_rotary(*placed, **arrays, **more)
        return backend.fetch(got)

    def expected(self):
        """Bound the error: 2 e (|a c| + |b s|), and one rounding.

        With absolute values, a' of -sin and b' of sin are these sums.
        """
        u, f, e = PRECISION[self.x.dtype.name]
        given = {"positions": np.arange(self.x.shape[1]), **self.given}
        arrays = [a.astype(np.float64) for a in (self.x, self.cos, self.sin)]
        ref = rotary.apply_rotary(*arrays, **given)
        x, cos, sin = map(abs, arrays)
        given["inverse"] = False
        sums = [abs(rotary.apply_rotary(x, cos, s, **given))
                for s in (sin, -sin)]  # fmt: skip
        tiny = 2 * e * np.maximum(*sums) + u * abs(ref) + f
        tiny[..., 2 * cos.shape[1] :] = 0
        return Expected(ref, ref, tiny, 0)


@on_each_backend(strategies.cases, each={"dtype": DTYPES})
def test_against_the_reference(backend, case):
    case = replace(case, seqlen_q=min(case.seqlen_q, POSITIONS))
    call = Call.of(case)
    got = call.run(backend, case)
    assert got.dtype == call.x.dtype
    assert_matches(got, call.expected(), "rotated", case)


@on_backends
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(backend, layout):
    """Of x, of out and of the tables."""
    case = Case("float16", 2, 5, num_heads_q=3, head_dim=12, layout=layout)
    call = Call.of(
        case, rotary_dim=8, positions=np.arange(20)[::2].reshape(2, 5)
    )
    want = call.expected()
    call.cos = np.repeat(call.cos, 2, axis=1)[:, ::2]
    call.sin = call.sin.T.copy().T
    assert_matches(call.run(backend, case), want, "rotated", case)
    if layout != "broadcast":
        out = backend.place(LAYOUTS[layout](np.zeros_like(call.x)))
        got = call.run(backend, case, out=out)
        assert_matches(got, want, "out", case)


@on_backends
@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(backend, dtype, interleaved):
    case = Case(dtype, 2, 5, num_heads_q=2, head_dim=10)
    call = Call.of(case, rotary_dim=6, interleaved=interleaved)
    want = call.run(backend, case)
    x = backend.place(call.x.copy())
    placed = [backend.place(t) for t in (call.cos, call.sin)]
    given = {
        name: backend.place(a) if isinstance(a, np.ndarray) else a
        for name, a in call.given.items()
    }
    with backend.running(case):
        assert cuflash.apply_rotary(x, *placed, **given, out=x) is x
    assert_bitwise(backend.fetch(x), want, "x")


@on_backends
@dtypes
@pytest.mark.parametrize("rank", [2, 3])
def test_axes_left_out(backend, dtype, rank):
    case = Case(dtype, 1, 5, head_dim=8)
    call = Call.of(case, rotary_dim=8, positions=np.arange(5)[::-1].copy())
    want = call.run(backend, case)
    index = {3: 0, 2: (0, slice(None), 0)}[rank]
    call.x = call.x[index]
    assert_bitwise(call.run(backend, case), want[index], "rotated")


@on_backends
def test_elements_that_kernels_cannot_read_in_place(backend):
    """The other byte order, and addresses between elements."""
    case = Case("float32", 2, 5, head_dim=8)
    call = Call.of(case, rotary_dim=4, positions=np.arange(10).reshape(2, 5))
    want = call.run(backend, case)
    if backend.name != "cupy":  # which has native bytes only
        call.x = call.x.astype(">f4")
        call.cos = call.cos.astype(call.cos.dtype.newbyteorder())
        call.given["positions"] = call.given["positions"].astype(">i8")
    room = np.zeros(call.sin.nbytes + 1, np.uint8)
    odd = room[1:].view(call.sin.dtype).reshape(call.sin.shape)
    odd[...] = call.sin
    call.sin = odd
    assert_bitwise(call.run(backend, case), want, "rotated")


@on_backends
@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "num_heads_q"])
def test_empty(backend, empty):
    case = Case("float32", **{"batch": 2, "seqlen_q": 3, empty: 0})
    call = Call.of(case)
    assert call.run(backend, case).shape == call.x.shape


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("bad", [-1, POSITIONS, 2**40])
def test_a_position_outside_the_tables_is_nan(backend, bad):
    """On a device, where the host does not check it: nothing is read."""
    case = Case("float32", 1, 3, head_dim=8)
    call = Call.of(case, rotary_dim=4, positions=np.array([1, bad, 2]))
    checked = validate.apply_rotary(call.x, call.cos, call.sin, **call.given)
    with backend.running(case):
        machine = cuflash.emulator.current().backend()
        got = rows.apply_rotary(checked, machine)
    assert_all(got[:, 1, :, :4], np.nan, "got[:, 1, :, :4]", case)
    assert_bitwise(got[:, 1, :, 4:], call.x[:, 1, :, 4:], "rest")
    assert_finite(got[:, [0, 2]], "got[:, [0, 2]]", case)
