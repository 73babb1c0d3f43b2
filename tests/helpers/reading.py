"""A backend that runs no kernel, but reads and writes as kernels would.

It follows the pointers, strides and TensorMaps of the argument struct.
"""

import zlib

import numpy as np

from cuflash.launch.structs import TensorMap

from .compare import assert_all, assert_elements
from .counting import Counting

# Axes by names of a struct's numbers, and where its strides are.
_ROWS = {
    **dict.fromkeys(("q", "dq", "q_dot"), ("seqlen_q", "q", "head_dim")),
    **dict.fromkeys(("k", "dk", "k_dot"), ("seqlen_k", "kv", "head_dim")),
    **dict.fromkeys(("v", "dv", "v_dot"), ("seqlen_k", "kv", "head_dim_v")),
    **dict.fromkeys(
        ("out", "dout", "out_dot"), ("seqlen_q", "q", "head_dim_v")
    ),
}
# What kernels of a direction write; a JVP also out and lse, unless it reads
# those of a forward call.
_WRITTEN = {
    "forward": ("out", "lse"),
    "backward": ("dq", "dk", "dv", "dbias", "dsink"),
    "jvp": ("out_dot", "lse_dot"),
    "double_backward": ("dq", "dk", "dv", "dbias", "dsink"),
    "kvcache": ("out", "lse"),
}


class Reading(Counting):
    """Fails where a struct does not lead to the arrays of `given`.

    given : what kernels are to read, in full rank, by pointer.
    numbers : what fields of `OptionNumbers`, or the seed, are to be.
    written : what they wrote, by pointer: numbers by chance.
    plans : of its launches.
    """

    def __init__(self, arch, family=None, **given):
        super().__init__(arch, family)
        self.given, self.written, self.numbers = given, {}, {}
        self.seen, self.maps, self.plans = {}, [], []

    def load(self, decided):
        return decided

    def copy(self, target, source):
        target[...] = source

    def address(self, arrays, written=False):
        found = super().address(arrays, written)
        self.seen |= zip(found, arrays, strict=True)
        return found

    def tensor_map(self, address, boxes):
        self.maps.append((address, boxes))
        return len(self.maps).to_bytes(TensorMap.itemsize, "little")

    def launch(self, loaded, arguments, kind):
        self.launches += len(loaded.launches)
        self.plans.append(loaded)
        _Launch(self, loaded, np.ndarray((), kind, arguments)).check()


def _offsets(shape, strides):
    """Bytes from the first element to each."""
    found = np.zeros((), np.int64)
    for length, stride in zip(shape, strides, strict=True):
        found = found[..., None] + np.arange(length) * int(stride)
    return found


class _Launch:
    def __init__(self, machine, plan, struct):
        self.machine, self.plan, self.struct = machine, plan, struct
        self.fields = _flat(struct)
        direction = plan.problem.direction
        self.writes = _WRITTEN[direction]
        if direction == "jvp" and not plan.after_forward:
            self.writes += "out", "lse"

    def check(self):
        p, named = self.plan.problem, self.fields
        if p.kvcache:
            self._check_caches(p, p.kvcache)
            return
        tokens = {"seqlen_q": p.seqlen_q, "seqlen_k": p.seqlen_k}
        heads = {"q": p.num_heads_q, "kv": p.num_heads_kv}
        for name, (length, head, dim) in _ROWS.items():
            shape = p.batch, tokens[length], heads[head], getattr(p, dim)
            if f"{name}_stride" in named:
                self._at(name, shape, (*named[f"{name}_stride"].item(), 1))
            elif name.endswith("_dot") and "tangents" in named:
                if name in named:
                    shape = p.tangents.count, *shape
                    strides = named["tangents"][name].item()
                    self._at(name, shape, (*strides, 1))
            if f"{name}_map" in named:
                self._by_tma(name, named[f"{name}_map"])
        rows = p.batch, p.num_heads_q, p.seqlen_q
        for name in ("lse", "dlse"):
            self._contiguous(name, rows)
        if p.tangents:
            self._contiguous("lse_dot", (p.tangents.count, *rows))
        if "options" in named:
            self._options(rows, p)

    def _options(self, rows, p):
        numbers, pairs = self.fields["options"], (*rows, p.seqlen_k)
        batch, heads, *tokens = pairs
        of = {
            "bias": ("bias_stride", pairs),
            "dbias": ("dbias_stride", pairs),
            "mask": ("mask_stride", pairs),
            "alibi_slopes": ("alibi_stride", (batch, heads)),
            "segment_ids_q": ("ids_q_stride", (batch, tokens[0])),
            "segment_ids_k": ("ids_k_stride", (batch, tokens[1])),
        }
        for name, (field, shape) in of.items():
            self._at(name, shape, numbers[field].item())
        self._at("sink", (heads,), (numbers["sink_stride"].item(),))
        self._contiguous("dsink", (heads,))
        for name, want in self.machine.numbers.items():
            got = numbers[name] if name in numbers.dtype.names else None
            got = self.fields[name] if got is None else got
            assert got == want, f"{name} is {got}, expected {want}"
        if p.tangents:
            moved = self.fields["tangents"]
            for name, shape in (("bias_dot", pairs), ("sink_dot", (heads,))):
                one = moved[name].item()
                strides = one if isinstance(one, tuple) else (one,)
                strides = moved[f"{name}_direction"].item(), *strides
                self._at(name, (p.tangents.count, *shape), strides)

    def _check_caches(self, p, cache):
        """As `check`; the caches are as given, whatever strides they have."""
        named, numbers = self.fields, self.fields["cache"]
        rows, heads = (p.batch, p.seqlen_q), (p.num_heads_kv,)
        shapes = {
            "q": (*rows, p.num_heads_q, p.head_dim),
            "out": (*rows, p.num_heads_q, p.head_dim_v),
        }
        held = cache.slots, cache.page_size or p.seqlen_k, *heads
        for name, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
            shapes[name] = *held, dim
            new = p.batch, cache.seqlen_new, *heads, dim
            strides = numbers[f"{name}_new_stride"].item()
            self._at(f"{name}_new", new, strides)
        if cache.rotary:
            self._at("q_given", shapes.pop("q"), numbers["q_stride"].item())
        for name, shape in shapes.items():
            strides = *named[f"{name}_stride"].item(), 1
            self._at(name, shape, strides)
            if name in "kv":
                self._check_cache(name, shape, strides, cache.alignment)
        self._contiguous("lse", (p.batch, p.num_heads_q, p.seqlen_q))
        self._of_caches(p, cache)

    def _check_cache(self, name, shape, strides, alignment):
        address = int(self.fields[name])
        itemsize = self.machine.seen[address].itemsize
        pairs = zip(strides[:3], shape[:3], strict=True)
        used = [x * itemsize for x, n in pairs if n > 1]
        assert not any(x % alignment for x in (address, *used)), (
            f"{name}_cache: planned for rows aligned to {alignment}, but "
            f"{address % 16} and {used}"
        )

    def _of_caches(self, p, cache):
        """Check tables and numbers of sequences."""
        numbers, options = self.fields["cache"], self.fields["options"]
        of_pages = cache.slots if cache.scales == "page" else 1
        scales = of_pages, p.num_heads_kv
        of = {
            "page_table": ("page_table_stride", (p.batch, cache.max_pages)),
            "k_scale": ("k_scale_stride", scales),
            "v_scale": ("v_scale_stride", scales),
            "cache_seqlens": ("cache_seqlens_stride", (p.batch,)),
            "cache_batch_idx": ("batch_idx_stride", (p.batch,)),
            "cache_leftpad": ("leftpad_stride", (p.batch,)),
        }
        if cache.rotary:
            table = int(numbers["num_positions"]), int(numbers["num_pairs"])
            of["rotary_cos"] = "cos_stride", table
            of["rotary_sin"] = "sin_stride", table
        for name, (field, shape) in of.items():
            strides = numbers[field].item()
            strides = strides if isinstance(strides, tuple) else (strides,)
            self._at(name, shape, strides)
        slopes = options["alibi_stride"].item()
        self._at("alibi_slopes", (p.batch, p.num_heads_q), slopes)
        self._at("sink", (p.num_heads_q,), (options["sink_stride"].item(),))

    def _contiguous(self, name, shape):
        strides = [int(np.prod(shape[i:])) for i in range(1, len(shape) + 1)]
        self._at(name, shape, strides)

    def _at(self, name, shape, strides):
        """Check, or write, the array of a pointer."""
        address = int(self.fields.get(name, 0))
        given = self.machine.given.get(name)
        if address == 0:
            unread = name in self.writes or name not in self.fields
            assert given is None or unread, f"{name} is null"
            return
        array = self.machine.seen[address]
        steps = [x * array.itemsize for x in strides]
        assert address % array.itemsize == 0, f"{name}: elements lie askew"
        self._check_alignment(name, address, shape, steps)
        elements = self._elements(name, array, shape, steps)
        if name in self.writes:
            self._write(name, array, elements)
            return
        want = self.machine.written.get(name) if given is None else given
        got = np.ascontiguousarray(array).ravel()[elements]
        assert_all(got, np.broadcast_to(want, shape), name, "read by a kernel")

    def _elements(self, name, array, shape, strides):
        """Return the elements of `array` that strides lead to."""
        own = _offsets(array.shape, array.strides).ravel()
        order, found = np.argsort(own), _offsets(shape, strides)
        last = len(own) - 1
        index = order[np.searchsorted(own, found, sorter=order).clip(0, last)]
        assert_elements(own[index], found, name, f"{strides} lead outside")
        return index

    def _write(self, name, array, elements):
        number = zlib.crc32(name.encode())
        # bfloat16 and all others hold these exactly.
        made = np.random.default_rng(number).integers(-99, 99, array.shape)
        array[...] = made
        assert len({*elements.flat}) == array.size, f"{name}: not all written"
        values = np.ascontiguousarray(array).ravel()
        self.machine.written[name] = (
            made if name == "dbias" else values[elements]
        )

    def _check_alignment(self, name, address, shape, strides):
        """Rows are read 16 bytes at a time, and sums of dq lie in order.

        simt reads one element at a time, but for delta's sums of 16 bits.
        """
        if name not in _ROWS or "q_stride" not in self.fields:
            return
        itemsize, family = strides[-1], self.plan.family
        reads = name not in self.writes
        by_elements = family == "simt" and itemsize > 2
        needed = itemsize if by_elements or not reads else 16
        if name == "out_dot" or family == "decode_simt":
            needed = itemsize
        if reads and self.plan.problem.direction == "jvp" and name == "out":
            needed = itemsize
        used = [x for x, n in zip(strides, shape, strict=True) if n > 1]
        assert not any(x % needed for x in (address, *used[:-1])), (
            f"{name}: rows are not aligned to {needed}: {address} {strides}"
        )
        adds = [dict(x.constants).get("ADDS_TO_DQ") for x in self.plan.kernels]
        if name == "dq" and any(adds):
            whole = [itemsize * int(np.prod(shape[i:])) for i in range(1, 4)]
            pairs = zip(strides, whole, shape[:3], strict=False)
            assert all(x == y for x, y, n in pairs if n > 1), (
                f"dq: zeroed in order, but has strides {strides}"
            )

    def _by_tma(self, name, value):
        """Check a TensorMap: of an input, as it is; of a result, where."""
        number = int.from_bytes(value.tobytes(), "little")
        address, boxes = self.machine.maps[number - 1]
        token, head, batch = boxes.strides
        strides = batch, token, head
        assert all(x > 0 and x % 16 == 0 for x in (address, *strides)), name
        array = self.machine.seen[address]
        own = self._elements(
            name, array, boxes.shape, (*strides, array.itemsize)
        )
        want = self.machine.given.get(name)
        if want is None:  # a result, or what does not move
            assert name.endswith("_dot") or own.size == array.size
            return
        got = np.ascontiguousarray(array).ravel()[own]
        assert_all(
            got,
            np.reshape(want, boxes.shape),
            f"{name}_map",
            "read by a kernel",
        )


def _flat(struct):
    """The fields of a struct, and of its ``arrays``, by name."""
    found = {}
    for name in struct.dtype.names:
        if name == "arrays":
            found |= _flat(struct[name])
        else:
            found[name] = struct[name]
    return found
