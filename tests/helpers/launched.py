"""Calls of each family whose arrays have all kinds of strides, on `Reading`.

A check runs a call of one direction: kernels must be led to each array.
"""

import numpy as np

from cuflash.launch import (
    attention as execute,
)
from cuflash.launch import (
    derivatives as execute_derivatives,
)
from cuflash.launch import (
    kvcache as execute_kvcache,
)
from cuflash.request.validate import attention as validate
from cuflash.request.validate import derivatives as validate_derivatives
from cuflash.request.validate import kvcache as validate_kvcache

from .compare import assert_bitwise
from .data import LAYOUTS, Case, inputs, lse_gradient, shapes
from .dtypes import DTYPES, lse_dtype
from .options import option_arrays
from .reading import Reading

# The dtype, the architecture and what else selects a family.
FAMILIES = {
    "sm90": ("bfloat16", "sm_90a", {}),
    "sm80": ("float16", "sm_80", {}),
    "decode": ("float16", "sm_80", {"num_splits": 2}),
    "decode_simt": ("float32", "sm_80", {"num_splits": 2}),
    "fma": ("float32", "sm_80", {}),
    "mma8_float64": ("float64", "sm_80", {}),
    "mma8_float32": ("float32", "sm_80", {"precision": "tf32x3"}),
    "simt": ("float32", "sm_75", {}),
    "simt16": ("float16", "sm_80", {}),
}
# What all calls with options have beside arrays, and what kernels get of it.
NUMBERS = {
    "window": (3, 1),
    "softcap": 2.0,
    "dropout": 0.25,
    "seed": 2**64 - 2**31 - 3,
}
FIELDS = {
    "window_left": 3,
    "window_right": 1,
    "softcap": 2.0,
    "drop_below": 2**30,
    "keep_factor": 1 / 0.75,
    "seed": NUMBERS["seed"],
}
OF_GRADIENTS = [x for x in FAMILIES if not x.startswith("decode")]
# Rows that end at a multiple of 16 bytes, and rows that do not. Hopper's
# kernels of derivatives run the first alone.
DIMS = (32, 16), (20, 12)


def swapped(array):
    """Bytes of the other order, which bfloat16 has not."""
    other = array.dtype.newbyteorder()
    return array if other == array.dtype else array.astype(other)


def slice_of_wider(array):
    """Only the address of the first element tells that rows are unaligned."""
    *outer, d = array.shape
    store = np.zeros((*outer, 24 + d), array.dtype)
    store[..., 20 : 20 + d] = array
    return store[..., 20 : 20 + d]


def askew(array):
    """The same strides, but an address that elements are not aligned to.

    Of bytes, none; of others by one byte, or by half an element.
    """
    itemsize = array.itemsize
    if itemsize == 1:
        return array
    pairs = zip(array.strides, array.shape, strict=True)
    ends = [stride * (n - 1) for stride, n in pairs]
    low, high = (sum(x for x in ends if x * sign > 0) for sign in (-1, 1))
    store = np.zeros(high - low + 2 * itemsize, np.uint8)
    start = 1 if array.ndim % 2 else itemsize // 2
    found = np.ndarray(
        array.shape, array.dtype, store, start - low, array.strides
    )
    found[...] = array
    return found


READ = [*LAYOUTS.values(), swapped, slice_of_wider, askew]
WRITTEN = [x for x in READ if x.__name__ != "broadcast"]


def any_axes(array, number):
    """An array of any rank, reversed, with gaps, or with gaps and moved."""
    if number % 4 == 0:
        return np.ascontiguousarray(array)
    if number % 4 == 1:
        return np.asfortranarray(array)
    store = np.zeros([2 * n for n in array.shape], array.dtype)
    gaps = (slice(number % 4 - 2, None, 2),) * array.ndim
    store[gaps] = array
    return store[gaps]


def of_any_axes(arrays, first, batch):
    """Give each option an order of axes, and half of them a skew address."""
    made = {
        name: any_axes(x, first + i)
        for i, (name, x) in enumerate(arrays.items())
    }
    return {
        name: askew(x) if (i + batch) % 2 else x
        for i, (name, x) in enumerate(made.items())
    }


def laid_out(arrays, first, layouts=READ):
    """Give each array a layout: all layouts, in turns of `first`."""
    return {
        name: layouts[(first + i) % len(layouts)](x)
        for i, (name, x) in enumerate(arrays.items())
    }


class Launched:
    """One call.

    Parameters
    ----------
    family : str
    batch : int
    first : int
        Which layout the first array has.
    names : tuple of str, optional
        The options that are arrays.

    Attributes
    ----------
    families : set of str
        Whose kernels ran, after `run`.
    """

    def __init__(self, family, batch, first, names=()):
        dtype, self.arch, self.more = FAMILIES[family]
        self.family = family.removesuffix("16")
        self.numbers = FIELDS if names else {}
        if names:
            self.more = {**self.more, **NUMBERS}
        dims = DIMS[(batch + first) % 2]
        self.case = Case(dtype, batch, 5, 7, 4, 2, *dims, arrays_of=names)
        self.first, self.rng = first, np.random.default_rng(1)
        self.families = set()
        arrays = dict(zip(shapes(self.case), inputs(self.case), strict=True))
        self.arrays = laid_out(arrays, first)
        self.options = of_any_axes(option_arrays(self.case), first, batch)

    def __repr__(self):
        return f"{self.family}, {self.case}, first={self.first}"

    def rows(self, number):
        """Numbers of rows, as lse."""
        rows = lse_gradient(self.case)
        rows = rows.astype(lse_dtype(DTYPES[self.case.dtype])) + number
        rows = any_axes(rows, self.first + number)
        return askew(rows) if (self.first + number) % 3 == 0 else rows

    def targets(self, **like):
        """Arrays that receive results."""
        made = {x: np.zeros_like(y, order="C") for x, y in like.items()}
        native = {
            x: y.astype(y.dtype.newbyteorder("=")) for x, y in made.items()
        }
        return laid_out(native, self.first + 5, WRITTEN)

    def moves(self, names, count):
        """Tangents of the named arrays; without an axis if count is None."""
        known = {**self.arrays, **self.options}
        lead = () if count is None else (count,)
        return {
            x: self._moved((*lead, *known[x].shape), known[x].dtype, i)
            for i, x in enumerate(x for x in names if x in known)
        }

    def _moved(self, shape, dtype, number):
        made = self.rng.standard_normal(shape).astype(dtype)
        number += self.first
        if number % 3 == 2:
            return askew(made)
        if number % 5 == 4 and len(shape) == 5:  # of directions every other
            return np.repeat(made, 2, axis=0)[::2]
        return any_axes(made, number)

    def run(self, check, launch, given, **read):
        """Call; return the machine and the results.

        given : arguments beside options.
        read : what kernels read under another name, or with more axes.
        """
        pairs = *self.case_rows, self.case.seqlen_k
        read = {**given, **self.options, **read}
        for name, shape in (("bias", pairs), ("mask", pairs),
                            ("alibi_slopes", pairs[:2])):  # fmt: skip
            if name in read:
                read[name] = np.broadcast_to(read[name], shape)
        if "bias_dot" in read:
            x = read["bias_dot"]
            x = x.reshape(len(x), *(1,) * (5 - x.ndim), *x.shape[1:])
            read["bias_dot"] = np.broadcast_to(x, (len(x), *pairs))
        wanted = "simt" if self.family == "simt" else None
        machine = Reading(self.arch, wanted, **read)
        machine.numbers = self.numbers
        call = check(**given, **self.options, **self.more)
        results = launch(call, machine)
        self.families = {x.family for x in machine.plans}
        return machine, results

    @property
    def case_rows(self):
        c = self.case
        return c.batch, c.num_heads_q, c.seqlen_q

    def check(self, machine, **results):
        """Results hold what kernels wrote."""
        for name, got in results.items():
            native = np.asarray(got, got.dtype.newbyteorder("="))
            want = np.asarray(machine.written[name], native.dtype)
            assert_bitwise(native, want, f"{name} of {self}")


# A call of each direction ----------------------------------------------------


def forward(p):
    qkv = {x: p.arrays[x] for x in "qkv"}
    target = p.targets(out=p.arrays["dout"])

    def check(**given):
        return validate.forward(**given, **target, return_lse=True)

    machine, (out, lse) = p.run(check, execute.forward, qkv)
    assert out is target["out"]
    p.check(machine, out=out, lse=lse)


def of_backward(p):
    """The arrays that backward reads; out has the layout after dout's."""
    given = laid_out(
        {x: p.arrays[x] for x in ("q", "k", "v", "dout")}
        | {"out": -p.arrays["dout"]},
        p.first,
    )
    return given | {"lse": p.rows(1), "dlse": p.rows(2)}


def asked(p, prefix):
    return {
        f"return_{prefix}{x}": True for x in ("bias", "sink") if x in p.options
    }


def backward(p):
    targets = p.targets(**{f"d{x}": p.arrays[x] for x in "qkv"})

    def check(**given):
        return validate.backward(**given, **targets, **asked(p, "d"))

    machine, results = p.run(check, execute.backward, of_backward(p))
    dbias = [f"d{x}" for x in ("bias", "sink") if x in p.options]
    names = ["dq", "dk", "dv", *dbias]
    p.check(machine, **dict(zip(names, results, strict=True)))


def jvp(p):
    qkv = {x: p.arrays[x] for x in "qkv"}
    count = (None, 2, 3)[(p.first + p.first // 3) % 3]
    dots = p.moves(("q", "k", "v", "bias", "sink"), count)

    def check(**given):
        dotted = {f"{name}_dot": x for name, x in dots.items()}
        return validate_derivatives.jvp(**given, **dotted, return_lse=True)

    read = {f"{x}_dot": y[None] if count is None else y
            for x, y in dots.items()}  # fmt: skip
    machine, results = p.run(check, execute_derivatives.jvp, qkv, **read)
    names = "out", "lse", "out_dot", "lse_dot"
    p.check(machine, **dict(zip(names, results, strict=True)))


def double_backward(p):
    dots = p.moves(("q", "k", "v", "bias", "sink"), None)

    def check(**given):
        moved = {f"dd{name}": x for name, x in dots.items()}
        return validate_derivatives.double_backward(
            **given, **moved, **asked(p, "d2"), return_ddlse=True
        )

    read = {f"{x}_dot": y[None] for x, y in dots.items()}
    machine, results = p.run(
        check, execute_derivatives.double_backward, of_backward(p), **read
    )
    others = [f"d{x}" for x in ("bias", "sink") if x in p.options]
    names = ["dq", "dk", "dv", "out_dot", *others, "lse_dot"]
    machine.written = {
        name: x[0] if name.endswith("_dot") else x
        for name, x in machine.written.items()
    }
    p.check(machine, **dict(zip(names, results, strict=True)))


# Caches ----------------------------------------------------------------------

HEADS, HEADS_KV, QUERIES, TOKENS, NEW = 4, 2, 3, 32, 2
# First columns of k_cache and, past 48, of v_cache: either is aligned to less.
STARTS = (0, 0), (0, 1), (1, 0), (0, 4), (4, 0), (2, 4), (4, 2)
KINDS_OF_CACHES = ("slots", "pages", "bytes")


def caches(dtype, batch, first, kind):
    """Call forward_kvcache with arrays of all layouts; return its family.

    kind : slots of one array that holds both caches, pages, or pages of
        float8 with scales.
    """
    rng = np.random.default_rng(first)
    d, dv = DIMS[first % 2]

    def drawn(*shape, dtype=DTYPES[dtype]):
        return rng.integers(-9, 9, shape).astype(dtype)

    if kind == "slots":
        held = (batch + 1, TOKENS)
    else:
        held = (4 * batch, TOKENS // 2)
    stored = np.uint8 if kind == "bytes" else DTYPES[dtype]
    of_k, of_v = STARTS[first % len(STARTS)]
    width = 80 + first // len(STARTS)  # which may unalign all rows
    both = drawn(*held, HEADS_KV, width, dtype=stored)
    held_by = {"k_cache": both[..., of_k : of_k + d],
               "v_cache": both[..., 48 + of_v : 48 + of_v + dv]}  # fmt: skip
    given = {"q": drawn(batch, QUERIES, HEADS, d)}
    given |= {
        "k_new": drawn(batch, NEW, HEADS_KV, d),
        "v_new": drawn(batch, NEW, HEADS_KV, dv),
    }
    given = laid_out(given, first)
    numbers = {
        "cache_seqlens": drawn(batch, dtype=np.int32) % 9 + 4,
        "alibi_slopes": drawn(batch, HEADS, dtype=np.float32),
        "sink": drawn(HEADS, dtype=lse_dtype(DTYPES[dtype])),
    }
    if kind == "slots":
        numbers["cache_batch_idx"] = np.arange(batch, 0, -1, dtype=np.int32)
        numbers["cache_leftpad"] = drawn(batch, dtype=np.int32) % 3
    else:
        pages = rng.permutation(4 * batch).reshape(batch, 4)
        numbers["page_table"] = pages.astype(np.int32)
    if kind == "bytes":
        scales = (4 * batch, HEADS_KV) if first % 2 else (HEADS_KV,)
        for name in ("k_scale", "v_scale"):
            numbers[name] = drawn(*scales, dtype=np.float32) + 20
    else:
        for name in ("rotary_cos", "rotary_sin"):
            numbers[name] = drawn(99, d // 2, dtype=np.float32)
        if first % 3 == 0:
            del numbers["rotary_cos"], numbers["rotary_sin"]
    numbers = of_any_axes(numbers, first, batch)
    read = {**given, **numbers,
            "k": held_by["k_cache"], "v": held_by["v_cache"]}  # fmt: skip
    if "rotary_cos" in numbers:
        read["q_given"] = read.pop("q")
    machine = Reading("sm_80", **read)
    out = WRITTEN[(first + 5) % len(WRITTEN)](np.zeros(
        (batch, QUERIES, HEADS, dv), DTYPES[dtype]))  # fmt: skip
    call = validate_kvcache.forward_kvcache(
        **given, **held_by, **numbers, causal=True, out=out, return_lse=True
    )
    out, lse = execute_kvcache.forward_kvcache(call, machine)
    assert_bitwise(np.asarray(out, DTYPES[dtype]), machine.written["out"],
                   "out")  # fmt: skip
    assert_bitwise(lse, machine.written["lse"], "lse")
    (plan,) = machine.plans
    return plan.family
