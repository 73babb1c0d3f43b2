r"""Operations and bytes of a problem, and the time and tiles they imply.

A kernel that executes F operations and moves N bytes takes at least
max(F / peak, N / bandwidth) seconds: the roofline. A *problem* is any object
with the fields of `Problem`: direction ("forward" or "backward"), dtype,
batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v and
causal. cuflash's own Problem is one.

Sources: [000], the quizzes of "Through the QKV projections"; [001], "Modern
GPU architecture"; [002], "The memory problem"; [003], "Memory versus
computation" and eq. 39, 43, 44, 70, 78 and 79; [FA] Dao et al. 2022,
arXiv:2205.14135, Algorithm 1; [R] Williams, Waterman and Patterson 2009,
doi:10.1145/1498765.1498785.

Example
-------
1,024 tokens, head_dim 64, float16, on an A100: materialised, the weights'
traffic takes five times as long as the arithmetic; tile by tile, arithmetic
is the limit.

>>> from types import SimpleNamespace
>>> from cuflash.reference import roofline
>>> problem = SimpleNamespace(
...     direction="forward", dtype="float16", batch=1, causal=False,
...     seqlen_q=1024, seqlen_k=1024, num_heads_q=1, num_heads_kv=1,
...     head_dim=64, head_dim_v=64,
... )
>>> for moved in (
...     roofline.materialised_bytes(problem), roofline.bytes_moved(problem)
... ):
...     floor = roofline.time_floor(problem, roofline.A100, moved=moved)
...     print(
...         f"arithmetic {1e6 * floor.arithmetic:.2f} us, "
...         f"traffic {1e6 * floor.traffic:.2f} us"
...     )
arithmetic 0.86 us, traffic 4.11 us
arithmetic 0.86 us, traffic 0.26 us
>>> roofline.forward_tiles(memory=96 * 1024, head_dim=64)
(384, 64)

One matrix of weights of one head, in float16:

>>> for tokens in (512, 2048, 8192, 32768, 131072):
...     size = roofline.square_bytes(tokens)
...     print(f"{tokens:7,} {size / 1e6:9,.1f} MB")
    512       0.5 MB
  2,048       8.4 MB
  8,192     134.2 MB
 32,768   2,147.5 MB
131,072  34,359.7 MB
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
LSE_BYTES = {"float16": 4, "bfloat16": 4, "float32": 4, "float64": 8}


class Problem(Protocol):
    """The fields that these functions read."""

    direction: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool


@dataclass(frozen=True)
class Device:
    """The peak rates of a device.

    Attributes
    ----------
    peak_flops : float
        Floating-point operations per second, for one dtype.
    bandwidth : float
        Bytes per second between the device and its main memory.
    """

    peak_flops: float
    bandwidth: float


# Dense float16 matmuls on tensor cores, from the data sheet.
A100 = Device(peak_flops=312e12, bandwidth=2.04e12)  # 80 GB SXM; [003]


@dataclass(frozen=True)
class MemoryLevel:
    """A level of a device's memory.

    Attributes
    ----------
    size : float
        In bytes.
    bandwidth : float
        Bytes per second.
    """

    size: float
    bandwidth: float

    def of(self, device: Device) -> Device:
        """Return a device that computes as fast, out of this memory.

        Its `ridge` is the intensity that arithmetic on operands of this
        level needs.
        """
        return Device(device.peak_flops, self.bandwidth)


# [002], "The memory hierarchy problem", has 40 to 80 GB of HBM at 1.5 to
# 2.0 TB/s and about 20 MB of SRAM at 19 TB/s; [001] has 192 KB of SRAM per
# multiprocessor, of which an A100 has 108. These are the 80 GB SXM's.
A100_HBM = MemoryLevel(size=80e9, bandwidth=2.04e12)
A100_SRAM = MemoryLevel(size=108 * 192 * 1024, bandwidth=19e12)


def is_forward(problem: Problem) -> bool:
    """Return whether the problem is a forward pass.

    Raises
    ------
    ValueError
        If the direction is neither "forward" nor "backward".
    """
    if problem.direction not in ("forward", "backward"):
        raise ValueError(
            "direction must be 'forward' or 'backward', got "
            f"{problem.direction!r}"
        )
    return problem.direction == "forward"


# ---------------------------------------------------------------- arithmetic


def visible_pairs(problem: Problem) -> int:
    """Return the number of visible (query, key) pairs of one head.

    With a causal mask, query i sees the keys j <= i + seqlen_k - seqlen_q.
    """
    if not problem.causal:
        return problem.seqlen_q * problem.seqlen_k
    first = problem.seqlen_k - problem.seqlen_q + 1  # what query 0 sees
    return sum(max(0, first + i) for i in range(problem.seqlen_q))


def product_flops(problem: Problem) -> dict[str, int]:
    r"""Return the floating-point operations of each matmul.

    Each visible pair and column takes a multiplication and an addition. The
    forward pass has two matmuls, together 4 T^2 d if head_dim_v = head_dim
    = d ([003], "Memory versus computation"). The backward pass has four,
    8 T^2 d, and recomputes S because P was not stored: 10 T^2 d.

    Returns
    -------
    dict of str to int
        By equation.
    """
    heads = problem.batch * problem.num_heads_q
    pairs = heads * visible_pairs(problem)
    over_head_dim = 2 * pairs * problem.head_dim
    over_head_dim_v = 2 * pairs * problem.head_dim_v
    if is_forward(problem):
        return {"S = Q K^T": over_head_dim, "O = P V": over_head_dim_v}
    return {
        "S = Q K^T": over_head_dim,
        "dV = P^T dO": over_head_dim_v,
        "dP = dO V^T": over_head_dim_v,
        "dQ = dS K": over_head_dim,
        "dK = dS^T Q": over_head_dim,
    }


def elementwise_flops(problem: Problem) -> int:
    """Return the operations outside the matmuls, as [003] counts them.

    Forward: 3 T^2 for the softmax. Backward: 2 T^2 for dS and 2 T d for
    delta. `flops` excludes them, because they do not run on tensor cores.
    """
    heads = problem.batch * problem.num_heads_q
    pairs = heads * visible_pairs(problem)
    if is_forward(problem):
        return 3 * pairs
    return 2 * pairs + 2 * heads * problem.seqlen_q * problem.head_dim_v


def flops(problem: Problem) -> int:
    """Return the floating-point operations of all matmuls."""
    return sum(product_flops(problem).values())


def projection_vjp_flops(
    seqlen: int, width: int, columns: int
) -> dict[str, int]:
    r"""Return the floating-point operations behind dQ, dK and dV.

    [000] asks for them in n = seqlen and d = width = columns: the three
    weight gradients take 6 n d^2 and dX another 6 n d^2, whereas dQ, dK, dV
    take 6 n^2 d. `folded_flops` counts dX without dQ, dK and dV.

    Parameters
    ----------
    seqlen : int
    width : int
        Columns of X.
    columns : int
        Columns of W_Q, and of W_K and of W_V.

    Returns
    -------
    dict of str to int
        By equation. The two additions of matrices in dX are not counted.
    """
    product = 2 * seqlen * width * columns
    return {
        "dW = X^T (dQ, dK, dV)": 3 * product,
        "dX = dQ W_Q^T + dK W_K^T + dV W_V^T": 3 * product,
    }


def folded_flops(seqlen: int, width: int, columns: int) -> dict[str, int]:
    """Return the operations of `multihead.folded_projection_vjp`'s products.

    Folding replaces the 6 n^2 columns operations of dQ, dK and dV by 6 n^2
    width: the same for one head as wide as X, num_heads times as many for
    the heads of a layer.

    Parameters
    ----------
    seqlen, width, columns : int
        As in `projection_vjp_flops`, of one head.

    Returns
    -------
    dict of str to int
        By equation.
    """
    return {
        "K W_Q^T, Q W_K^T, dO W_V^T": 3 * 2 * seqlen * width * columns,
        "dX = dS (K W_Q^T) + dS^T (Q W_K^T) + P^T (dO W_V^T)": (
            3 * 2 * seqlen**2 * width
        ),
    }


# --------------------------------------------------------------------- bytes


def array_bytes(problem: Problem) -> dict[str, int]:
    """Return the bytes of each argument and result, moved once.

    No schedule moves fewer; `traffic` counts what each schedule moves.

    Returns
    -------
    dict of str to int
        Forward reads q, k, v and writes out, lse. Backward reads these five
        and dout, and writes dq, dk, dv.
    """
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    keys = problem.batch * problem.num_heads_kv * problem.seqlen_k
    item = ITEM_BYTES[str(problem.dtype)]
    sizes = {
        "q": item * rows * problem.head_dim,
        "k": item * keys * problem.head_dim,
        "v": item * keys * problem.head_dim_v,
        "out": item * rows * problem.head_dim_v,
        "lse": LSE_BYTES[str(problem.dtype)] * rows,
    }
    if not is_forward(problem):
        sizes["dout"] = sizes["out"]
        sizes |= {"d" + name: sizes[name] for name in ("q", "k", "v")}
    return sizes


def bytes_moved(problem: Problem) -> int:
    """Return the fewest bytes that any schedule of the problem moves."""
    return sum(array_bytes(problem).values())


def materialised_bytes(problem: Problem) -> int:
    """Return the bytes moved for T x T matrices stored in the dtype.

    4 T^2 elements forward and 7 T^2 backward ([003], eq. 30 and "Backward
    pass: insufficient memory"); a mask does not reduce them.
    """
    heads = problem.batch * problem.num_heads_q
    accesses = 4 if is_forward(problem) else 7
    square = problem.seqlen_q * problem.seqlen_k
    return accesses * heads * square * ITEM_BYTES[str(problem.dtype)]


def square_bytes(seqlen: int, dtype: str = "float16") -> int:
    """Return the bytes of one seqlen x seqlen matrix, such as P of one head.

    [002], "The quadratic bottleneck", lists 0.5 MB, 8 MB (rounded: 8.4),
    134 MB, 2.1 GB and 34 GB for 512 to 131,072 tokens, and adds that these
    matrices exceed a GPU's memory from 100,000 tokens on. One of them does
    not exceed 80 GB, but S and P of two heads do.

    Parameters
    ----------
    seqlen : int
    dtype : str, optional
    """
    return seqlen**2 * ITEM_BYTES[str(dtype)]


# ---------------------------------------------------------------------- time


@dataclass(frozen=True)
class Floor:
    """Lower bounds of the time for arithmetic and for traffic.

    Attributes
    ----------
    arithmetic, traffic : float
        In seconds.
    """

    arithmetic: float
    traffic: float

    @property
    def seconds(self) -> float:
        """The larger of the two: at best they overlap ([R])."""
        return max(self.arithmetic, self.traffic)

    @property
    def memory_bound(self) -> bool:
        """Whether traffic takes longer."""
        return self.traffic > self.arithmetic


def time_floor(
    problem: Problem, device: Device, *, moved: int | None = None
) -> Floor:
    """Return lower bounds of a problem's time on a device.

    [003] computes 0.86 us of arithmetic for T = 1024 and d = 64 in float16
    on an A100, and 3.74 us for the 4 T^2 accesses of the materialised
    schedule. The second number assumes 2^40 bytes per terabyte but 10^12
    operations per teraflop; with 10^12 for both it is 4.11 us.

    Parameters
    ----------
    problem : Problem
    device : Device
    moved : int, optional
        Bytes moved; default `bytes_moved`. Another choice is
        `materialised_bytes`.

    Returns
    -------
    Floor
    """
    moved = bytes_moved(problem) if moved is None else moved
    return Floor(flops(problem) / device.peak_flops, moved / device.bandwidth)


def arithmetic_intensity(
    problem: Problem, *, moved: int | None = None
) -> float:
    """Return operations per byte; 0 if no bytes are moved.

    Parameters
    ----------
    problem : Problem
    moved : int, optional
        Bytes moved; default `bytes_moved`.
    """
    moved = bytes_moved(problem) if moved is None else moved
    return flops(problem) / moved if moved else 0.0


def ridge(device: Device) -> float:
    """Return the operations per byte above which arithmetic limits ([R])."""
    return device.peak_flops / device.bandwidth


# ---------------------------------------------------------------- tile sizes


def forward_blocks(
    block_q: int, block_k: int, head_dim: int, head_dim_v: int
) -> dict[str, int]:
    """Return the elements of each block that forward keeps in fast memory.

    Four ([003], "FlashAttention VI"): v overwrites k once S is computed, and
    P overwrites S. Vectors of one number per row are not counted.
    """
    return {
        "q": block_q * head_dim,
        "out": block_q * head_dim_v,
        "k or v": block_k * max(head_dim, head_dim_v),
        "s or p": block_q * block_k,
    }


def backward_blocks(
    block_q: int, block_k: int, head_dim: int, head_dim_v: int
) -> dict[str, int]:
    """Return the elements of each block that backward keeps in fast memory.

    Eight, in either loop order ([003], "FlashAttention backward pass XVI"
    and "(i, j) versus (j, i) VIII"): all are in use at once. dP counts as
    dS, which overwrites it.
    """
    return {
        "q": block_q * head_dim,
        "k": block_k * head_dim,
        "v": block_k * head_dim_v,
        "p or ds": block_q * block_k,
        "dout": block_q * head_dim_v,
        "dq": block_q * head_dim,
        "dk": block_k * head_dim,
        "dv": block_k * head_dim_v,
    }


def forward_tiles(
    memory: int, head_dim: int, head_dim_v: int | None = None
) -> tuple[int, int]:
    r"""Return the largest (block_q, block_k) for a fast memory.

    .. math::
        B_r = \lfloor M / 4d \rfloor,\quad
        B_c = \min(\lfloor M / 4d \rfloor, d)

    [003], eq. 44: each of four blocks takes at most M/4; P does, because
    B_r B_c <= (M / 4d) d. B_r is the larger, because K and V are loaded
    T / B_r times. (Eq. 43 of [003] requires less than M/4, but eq. 44
    reaches M/4, which suffices.)

    Parameters
    ----------
    memory : int
        M, in elements.
    head_dim : int
    head_dim_v : int, optional
        Default head_dim. d is the larger of the two.

    Returns
    -------
    block_q, block_k : int
    """
    return _tiles_within(memory, 4, head_dim, head_dim_v)


def backward_tiles(
    memory: int, head_dim: int, head_dim_v: int | None = None
) -> tuple[int, int]:
    r"""Return the largest (block_q, block_k) of the backward pass.

    .. math::
        B_r = \lfloor M / 8d \rfloor,\quad
        B_c = \min(\lfloor M / 8d \rfloor, d)

    [003], eq. 79. Eight blocks are in use at once, so each may take M/8.
    [FA] uses M/4 as in the forward pass; the eight blocks would then need
    up to 2 M, which [003] considers an error.

    Parameters
    ----------
    memory, head_dim, head_dim_v
        As in `forward_tiles`.

    Returns
    -------
    block_q, block_k : int
    """
    return _tiles_within(memory, 8, head_dim, head_dim_v)


def forward_rows(memory: int, seqlen_k: int) -> int:
    """Return how many rows of S fit into a fast memory whole: M / T.

    [003], eq. 39: for `early_schedules.forward_row_blocks`; P overwrites S.
    The tiles of Q, K and V are not counted.

    Parameters
    ----------
    memory : int
        M, in elements.
    seqlen_k : int
    """
    return memory // seqlen_k


def backward_rows(memory: int, seqlen_k: int) -> int:
    """Return how many rows of P and of dP fit together: M / 2T.

    [003], eq. 70: for `early_schedules.backward_row_blocks`; dS overwrites
    one of them.

    Parameters
    ----------
    memory, seqlen_k : int
        As in `forward_rows`.
    """
    return memory // (2 * seqlen_k)


def _tiles_within(
    memory: int, blocks: int, head_dim: int, head_dim_v: int | None
) -> tuple[int, int]:
    d = max(head_dim, head_dim if head_dim_v is None else head_dim_v)
    largest = memory // (blocks * d)
    if largest < 1:
        raise ValueError(
            f"{blocks} blocks of one row of {d} elements need a fast memory "
            f"of {blocks * d} elements, got {memory}"
        )
    return largest, min(largest, d)
