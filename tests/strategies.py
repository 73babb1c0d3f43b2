"""What Hypothesis draws: the structure of a call.

Array elements are not drawn one by one. A case has a seed that determines its
arrays (helpers/data.py), so examples are small, quick to draw, shrink by
their shapes and print as one line.

Kernels take a second each to compile for the emulator, several for a GPU. What
a kernel is compiled for (dtype, padded head dimensions, tile, mask, sign of
scale, architecture) is drawn from all possibilities if `wide`, and in the
nightly profile; otherwise from a few, which the tests share.
"""

import functools
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from cuflash.plans.plan import device_of_arch, family_of, legal_tiles
from helpers.data import Case, Emulation, shapes
from helpers.dtypes import DTYPES
from helpers.kernels import small_problem
from helpers.kvcache_calls import KVCase
from helpers.options import (
    MAKERS,
    NUMBERS,
    TABLE,
    completed,
    everything,
)
from helpers.punishing import KINDS

# Kernels fail most often around tile sizes and vector widths.
EDGES = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 200]
HEAD_DIMS = [1, 2, 7, 8, 16, 31, 32, 64, 65, 96, 128, 192, 255, 256]

# Padded or not, equal for q and v or not.
WIDE_HEAD_DIMS = ((320, 64), (64, 257))  # above 256
FEW_HEAD_DIMS = {
    "emulated": [(16, 16), (32, 64), (40, 72)],
    "cupy": [(7, 7), (40, 40), (64, 64), (128, 128), (160, 80), (256, 256)],
}

# Plans depend on wgmma, cp.async, the size of shared memory, tuned tiles.
ARCHS = ["sm_75", "sm_80", "sm_90a", "sm_86", "sm_100", "sm_120"]
# float64: simt kernels on the first, all families on the others.
ARCHS_OF_WIDE_TYPES = ["sm_75", "sm_80", "sm_86", "sm_90a"]
FAMILIES = ["sm_80", "sm_90a"]  # one of each kind of kernels

# Most multiply-adds of an emulated forward pass: those of one head of 200
# tokens with head_dim 128, whose backward pass takes a second. With more heads
# or columns there are fewer keys.
LARGEST_WORK = 200 * 200 * 256

SEEDS = st.integers(0, 2**32 - 1)

# How numbers are chosen, by names in helpers.data.VALUES.
VALUES = ["normal", "punishing", *(kind.__name__ for kind in KINDS)]


def lengths(longest):
    edges = [n for n in EDGES if n <= longest]
    return st.integers(0, longest) | st.sampled_from(edges)


def is_wide(backend, wide):
    """Whether to draw from all existing kernels."""
    nightly = settings.get_current_profile_name() == "nightly"
    return wide or (nightly and backend.name != "cupy")


def head_dims(backend, wide=False, smallest=1):
    """Draw (head_dim, head_dim_v), often equal."""
    if backend.name != "numpy" and not is_wide(backend, wide):
        few = FEW_HEAD_DIMS[backend.name]
        return st.sampled_from([d for d in few if min(d) >= smallest])
    known = [d for d in HEAD_DIMS if d >= smallest]
    one = st.integers(smallest, 256) | st.sampled_from(known)
    return one.map(lambda d: (d, d)) | st.tuples(one, one)


def block_sizes(backend, dtype, head_dims, precision):
    """Draw block_q and block_k for the CPU path, whose loops are in Python.

    Other tests cover the kernels' block sizes.
    """
    if backend.name != "numpy":
        return st.just((None, None))
    tuned = (None, None)  # alone where a head has few tiles, none in common
    # Of the next multiples of 32, to find them once for many.
    sizes = legal_blocks(
        dtype, *(-(-d // 32) * 32 for d in head_dims), precision
    )
    return st.just(tuned) | st.sampled_from([*sizes, tuned])


@functools.cache
def legal_blocks(dtype, head_dim, head_dim_v, precision=None):
    """Return the block sizes that sm_80 kernels support in both directions."""
    case = Case(dtype, head_dim=head_dim, head_dim_v=head_dim_v,
                precision=precision)  # fmt: skip
    forward, backward = (
        {(tile.block_q, tile.block_k) for tile in tiles(case, x, "sm_80")}
        for x in ("forward", "backward")
    )
    return sorted(forward & backward)


def scales(backend, wide):
    """Draw scales; negative ones only if they need no other kernel."""
    few = st.sampled_from([None, 0.25])
    if backend.name == "cupy" or not is_wide(backend, wide):
        return few
    return few | st.floats(-1, 1)


def tiles(case, direction, arch):
    """Return all tiles with which the kernels can run a case."""
    return _tiles(
        direction, case.dtype, case.head_dim, case.head_dim_v, case.precision,
        arch,
    )  # fmt: skip


@functools.cache  # drawn again and again
def _tiles(direction, dtype, head_dim, head_dim_v, precision, arch):
    problem = small_problem(
        direction, dtype, head_dim, head_dim_v=head_dim_v, precision=precision
    )
    device = device_of_arch(arch)
    return tuple(legal_tiles(problem, device, family_of(problem, device)))


def archs_of(case, archs, wide):
    """Draw an architecture, half of the time one of the first two."""
    if case.precision:
        return st.sampled_from(["sm_80", "sm_90a", "sm_86"][: 2 + wide])
    if case.dtype in ("float32", "float64"):
        return st.sampled_from(ARCHS_OF_WIDE_TYPES[: 4 if wide else 2])
    if not wide:
        return st.sampled_from(archs)
    return st.sampled_from(FAMILIES) | st.sampled_from(ARCHS)


@st.composite
def emulations(draw, case, archs, wide=False):
    """Draw a case's emulated machine, its tiles and its scheduling order."""
    arch = draw(archs_of(case, archs, wide))
    chosen = {}
    for direction in ("forward", "backward"):
        legal = tiles(case, direction, arch)
        if not wide:  # one besides of the tuned one, of some 512 pairs
            legal = [
                min(legal, key=lambda x: abs(x.block_q * x.block_k - 512))
            ]
        chosen[f"{direction}_tile"] = draw(st.sampled_from([None, *legal]))
    return Emulation(
        arch=arch,
        seed=draw(SEEDS),
        # With one resident block, waiting for a later block deadlocks.
        resident=draw(st.just(1) | st.integers(1, 5)),
        # Few SMs, so that a persistent block takes several tiles.
        num_sms=draw(st.sampled_from([None, 1, 3])),
        # A small L2, so that there are several sections of heads.
        l2_bytes=draw(st.sampled_from([None, 1, 1 << 18])),
        **chosen,
    )


def on_backend(case, backend, archs=("sm_80",), wide=False):
    """Draw the machine that emulates a case, if it is emulated."""
    if backend.name != "emulated":
        return st.just(case)
    emulated = emulations(case, archs, is_wide(backend, wide))
    return emulated.map(lambda on: replace(case, on=on))


@st.composite
def cases(
    draw,
    backend,
    dtype=None,
    dtypes=tuple(DTYPES),
    layout="contiguous",
    causal=True,
    longest=200,
    archs=("sm_80",),
    wide=False,
    precision=None,
    values=VALUES,
    dims=None,
):
    """Draw a whole call; causal=False for calls that never are.

    archs : emulated architectures, if not wide.
    dims : the head dimensions to draw from, if they are few.
    """
    batch, num_heads_kv = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    num_heads_q = num_heads_kv * draw(st.integers(1, 3))
    head_dim, head_dim_v = draw(
        st.sampled_from(dims) if dims else head_dims(backend, wide)
    )
    work = batch * num_heads_q * (head_dim + head_dim_v)
    seqlen_q = draw(lengths(longest))
    fitting = longest
    if backend.name == "emulated":
        fitting = min(longest, LARGEST_WORK // (work * max(seqlen_q, 1)))
    seqlen_k = draw(lengths(fitting))
    dtype = dtype or draw(st.sampled_from(dtypes))
    block_q, block_k = draw(
        block_sizes(backend, dtype, (head_dim, head_dim_v), precision)
    )
    case = Case(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal and draw(st.booleans()),
        scale=draw(scales(backend, wide)),
        block_q=block_q,
        block_k=block_k,
        deterministic=draw(st.booleans()),
        precision=precision,
        layout=layout,
        seed=draw(SEEDS),
        values=draw(st.sampled_from(values)),
    )
    return draw(on_backend(case, backend, archs, wide))


@st.composite
def spoiled(draw, backend, dtype, names, archs=("sm_80",)):
    """Draw a case with up to 3 spoiled elements."""
    case = Case(
        dtype,
        seqlen_q=draw(st.integers(1, 150)),
        seqlen_k=draw(st.integers(1, 150)),
        num_heads_q=2,
        head_dim=draw(st.sampled_from([16, 40, 64])),
        causal=draw(st.booleans()),
        seed=draw(SEEDS),
        values=draw(st.sampled_from(VALUES)),
    )
    places = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(names))
        index = [draw(st.integers(0, n - 1)) for n in shapes(case)[name]]
        value = draw(st.sampled_from(["nan", "inf", "-inf"]))
        places.append((name, tuple(index), value))
    case = replace(case, spoiled=tuple(places))
    return draw(on_backend(case, backend, archs))


# Options that are compiled together, where not all sets of them are drawn.
FEW_OPTIONS = [
    ("window", "alibi_slopes", "sink"),
    ("window", "segment_ids_q"),
    ("softcap", "bias"),
    ("mask", "dropout", "sink"),
    everything(),
]


def options(backend, wide=False):
    """Draw the names of a call's options."""
    if backend.name == "emulated" and not is_wide(backend, wide):
        return st.sampled_from(FEW_OPTIONS).map(set)
    return st.sets(st.sampled_from([*MAKERS, *NUMBERS]))


# Sets of options of packed sequences that share kernels.
FEW_PACKED_OPTIONS = [
    set(),
    {"window", "alibi_slopes", "sink"},
    {"window", "alibi_slopes_of_batches", "sink"},  # of sequences
    {"softcap", "dropout", "sink"},
]


@st.composite
def packed_cases(draw, backend, **others):
    """Draw packed sequences of any lengths, with any options."""
    case = draw(cases(backend, **others))
    if backend.name == "cupy" and "16" in case.dtype:
        # Hopper sums dq in integers then: bounds of test_integer_dq.py.
        case = replace(case, deterministic=False)
    names = draw(st.sampled_from(FEW_PACKED_OPTIONS))
    numbers = {n: draw(TABLE[n].draw(case)) for n in NUMBERS if n in names}
    count = draw(st.integers(0, 6))
    offsets = []
    for total in (case.seqlen_q, case.seqlen_k):
        # Some tokens at the end may belong to no sequence.
        ends = st.lists(lengths(total), min_size=count, max_size=count)
        offsets.append((0, *sorted(draw(ends))))
    arrays = tuple(sorted(names & set(MAKERS)))
    return replace(
        case, batch=1, arrays_of=arrays, offsets=tuple(offsets), **numbers
    )


@st.composite
def optional_cases(draw, backend, **others):
    """Draw a whole call with any masks and score modifications together."""
    case = draw(cases(backend, **others))
    names = draw(options(backend))
    names = completed(names)
    if "alibi_slopes_of_batches" in names:
        names -= {"alibi_slopes"}
    if "bias" in names:  # its gradient is summed in no fixed order
        case = replace(case, deterministic=False)
    numbers = {n: draw(TABLE[n].draw(case)) for n in NUMBERS if n in names}
    arrays = tuple(sorted(names & set(MAKERS)))
    return replace(case, arrays_of=arrays, **numbers)


@st.composite
def decode_cases(draw, backend):
    """Draw a call of few queries and many keys, with some options.

    Most rows of 16-bit types up to head_dim 256 are computed by
    decode/forward.cu, up to eight rows of the others by forward_simt.cu.
    """
    num_heads_kv = draw(st.integers(1, 2))
    group_size = draw(st.sampled_from([1, 2, 5, 8]))
    dtype = draw(st.sampled_from(list(DTYPES)))
    head_dim, head_dim_v = draw(
        st.sampled_from(
            [(64, 64), (128, 128), (40, 72), (256, 160), (320, 33)]
        )
    )
    on_cuda_cores = dtype in ("float32", "float64") or head_dim > 256
    most_rows = 8 if on_cuda_cores else 64
    case = Case(
        dtype=dtype,
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(st.integers(1, most_rows // group_size)),
        seqlen_k=draw(st.integers(512, 900)),
        num_heads_q=num_heads_kv * group_size,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, -0.1])),
        seed=draw(SEEDS),
        values=draw(st.sampled_from(VALUES)),
    )
    names = completed(draw(st.just(set()) | options(backend)))
    if "alibi_slopes_of_batches" in names:
        names -= {"alibi_slopes"}
    numbers = {n: draw(TABLE[n].draw(case)) for n in NUMBERS if n in names}
    arrays = tuple(sorted(names & set(MAKERS)))
    # From one part of the keys to one for each tile.
    on = Emulation(
        draw(st.sampled_from(["sm_80", "sm_90a"])),
        seed=case.seed,
        num_sms=draw(st.sampled_from([None, 1, 5])),
    )
    return replace(case, arrays_of=arrays, on=on, **numbers)


PAGE_SIZES = [1, 2, 3, 7, 16, 17, 64, 128]

# Sets of options of calls with a cache that share kernels.
FEW_CACHE_OPTIONS = [
    set(),
    {"window", "alibi_slopes", "sink"},
    {"window", "alibi_slopes_of_batches", "sink"},
    {"softcap", "sink"},
]


@st.composite
def kvcache_cases(draw, backend, dtype=None, float8=False, longest=150):
    """Draw a forward_kvcache call."""
    known = [x for x in DTYPES if not (float8 and x == "float64")]
    dtype = dtype or draw(st.sampled_from(known))
    head_dim, head_dim_v = draw(head_dims(backend))
    batch = draw(st.integers(1, 3))
    by_int = draw(st.booleans())
    count = 1 if by_int else batch
    before = draw(
        st.lists(lengths(longest), min_size=count, max_size=count)
    ) * (batch if by_int else 1)
    few = st.sampled_from([0, 1, 2, 5]) | st.integers(0, 40)
    ragged = draw(
        st.none() | st.lists(few, min_size=batch, max_size=batch).map(tuple)
    )
    packed_new = ragged is not None and draw(st.booleans())
    seqlen_new = (
        draw(st.integers(0, 5)) if packed_new or draw(st.booleans()) else None
    )
    page_size = draw(st.none() | st.sampled_from(PAGE_SIZES))
    pad = st.lists(few, min_size=batch, max_size=batch).map(tuple)
    rotary = None
    if seqlen_new is not None:
        rotary = draw(st.none() | st.integers(0, head_dim // 2))
    names = draw(st.sampled_from(FEW_CACHE_OPTIONS))
    bound = st.none() | st.sampled_from([0, 1, 16, 63, 300])
    splits = st.none() | st.sampled_from([1, 2, 5])
    scales = ["head"] if page_size is None else ["head", "page"]
    latent = ["no"]
    if head_dim_v <= head_dim and is_wide(backend, backend.name == "numpy"):
        latent = ["no", "yes", "view"]
    return KVCase(
        dtype=dtype,
        before=tuple(before),
        by_int=by_int,
        seqlen_q=draw(few),
        ragged=ragged,
        unused=draw(st.integers(0, 2)),
        seqlen_new=seqlen_new,
        packed_new=packed_new,
        num_heads_kv=draw(st.integers(1, 2)),
        group_size=draw(st.sampled_from([1, 2, 5, 8])),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=page_size,
        spare=draw(st.integers(0, 3)),
        slots=page_size is None and draw(st.booleans()),
        leftpad=draw(st.none() | pad) if page_size is None else None,
        rotary_dim=None if rotary is None else 2 * rotary,
        interleaved=draw(st.booleans()),
        scales=draw(st.sampled_from(scales)) if float8 else None,
        latent=draw(st.sampled_from(latent)),
        scale=draw(st.sampled_from([None, 0.25, -0.1])),
        causal=draw(st.booleans()),
        window=draw(st.tuples(bound, bound)) if "window" in names else None,
        softcap=draw(st.sampled_from([1.0, 30.0]))
        if "softcap" in names
        else None,
        arrays_of=tuple(sorted(names - {"window", "softcap"})),
        num_splits=draw(splits) if dtype.endswith("float16") else None,
        seed=draw(SEEDS),
        values=draw(st.sampled_from(VALUES)),
        on=Emulation(
            draw(st.sampled_from(FAMILIES)),
            seed=draw(SEEDS),
            num_sms=draw(st.sampled_from([None, 1, 5])),
        ),
    )
