r"""Operations and bytes of a problem, and the time and tiles they imply.

A kernel that does F operations and moves N bytes takes at least
max(F / peak, N / bandwidth): the roofline. A *problem* here is any object
with the fields direction ("forward" or "backward"), dtype, batch,
seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v and
causal, as cuflash's own Problem has them.

Sources: [003], "Memory versus computation" and eq. 43, 44, 78 and 79; [FA]
Dao et al. 2022, arXiv:2205.14135, Algorithm 1; [R] Williams, Waterman and
Patterson 2009, doi:10.1145/1498765.1498785.
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
        Floating-point operations, for the dtype in question.
    bandwidth : float
        Bytes between the device and its main memory.
    """

    peak_flops: float
    bandwidth: float


# Half-precision matrix products without sparsity, from the data sheet.
A100 = Device(peak_flops=312e12, bandwidth=2.04e12)  # 80 GB SXM; [003]


def is_forward(problem: Problem) -> bool:
    """Return whether the problem is a forward pass, not a backward one.

    Raises
    ------
    ValueError
        For any other direction.
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

    Causal, query i sees the keys j <= i + seqlen_k - seqlen_q.
    """
    if not problem.causal:
        return problem.seqlen_q * problem.seqlen_k
    first = problem.seqlen_k - problem.seqlen_q + 1  # what query 0 sees
    return sum(max(0, first + i) for i in range(problem.seqlen_q))


def product_flops(problem: Problem) -> dict[str, int]:
    r"""Return the operations of each matmul.

    A multiplication and an addition for each visible pair and column. The
    forward pass has two products, 4 T^2 d in all where head_dim_v = head_dim
    = d ([003], "Memory versus computation"). The backward pass has four,
    8 T^2 d, and S once more because P was not kept: 10 T^2 d.

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
    """Return the operations outside the products, as [003] counts them.

    Forward, 3 T^2: softmax. Backward, 2 T^2: dS, and 2 T d: delta. They are
    not part of `flops`, for they run on other units than the products.
    """
    heads = problem.batch * problem.num_heads_q
    pairs = heads * visible_pairs(problem)
    if is_forward(problem):
        return 3 * pairs
    return 2 * pairs + 2 * heads * problem.seqlen_q * problem.head_dim_v


def flops(problem: Problem) -> int:
    """Return the operations of all matmuls."""
    return sum(product_flops(problem).values())


# --------------------------------------------------------------------- bytes


def array_bytes(problem: Problem) -> dict[str, int]:
    """Return the bytes that each argument and result must move once.

    No schedule does with less; `traffic` counts what each really moves.

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
    """Return the least bytes that the problem moves."""
    return sum(array_bytes(problem).values())


def materialised_bytes(problem: Problem) -> int:
    """Return the bytes of T x T matrices if each is stored in the dtype.

    4 T^2 elements forward and 7 T^2 backward ([003], eq. 30 and "Backward
    pass: insufficient memory"); no mask saves any of them.
    """
    heads = problem.batch * problem.num_heads_q
    accesses = 4 if is_forward(problem) else 7
    square = problem.seqlen_q * problem.seqlen_k
    return accesses * heads * square * ITEM_BYTES[str(problem.dtype)]


# ---------------------------------------------------------------------- time


@dataclass(frozen=True)
class Floor:
    """Least seconds of arithmetic and of traffic.

    Attributes
    ----------
    arithmetic, traffic : float
    """

    arithmetic: float
    traffic: float

    @property
    def seconds(self) -> float:
        """The longer of the two: at best they overlap ([R])."""
        return max(self.arithmetic, self.traffic)

    @property
    def memory_bound(self) -> bool:
        """Whether traffic takes longer."""
        return self.traffic > self.arithmetic


def time_floor(
    problem: Problem, device: Device, *, moved: int | None = None
) -> Floor:
    """Return the least time of a problem on a device.

    [003] reckons 0.86 us of arithmetic for T = 1024 and d = 64 in float16
    on an A100, and 3.74 us for the 4 T^2 accesses of the materialised
    schedule. The second number takes a terabyte for 2^40 bytes but a
    teraflop for 10^12; with 10^12 for both it is 4.11 us.

    Parameters
    ----------
    problem : Problem
    device : Device
    moved : int, optional
        Bytes; default `bytes_moved`. `materialised_bytes` is another choice.

    Returns
    -------
    Floor
    """
    moved = bytes_moved(problem) if moved is None else moved
    return Floor(flops(problem) / device.peak_flops, moved / device.bandwidth)


def arithmetic_intensity(
    problem: Problem, *, moved: int | None = None
) -> float:
    """Return operations per byte; 0 for a problem that moves nothing.

    Parameters
    ----------
    problem : Problem
    moved : int, optional
        Bytes; default `bytes_moved`.
    """
    moved = bytes_moved(problem) if moved is None else moved
    return flops(problem) / moved if moved else 0.0


def ridge(device: Device) -> float:
    """Return the intensity above which arithmetic is the limit ([R])."""
    return device.peak_flops / device.bandwidth


# ---------------------------------------------------------------- tile sizes


def forward_blocks(
    block_q: int, block_k: int, head_dim: int, head_dim_v: int
) -> dict[str, int]:
    """Return the elements of each block that forward keeps in fast memory.

    Four ([003], "FlashAttention VI"): v takes the place of k once S is
    made, and P the place of S. Vectors of one number per row are not counted.
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
    and "(i, j) versus (j, i) VIII"): all are in use in one step. dP takes
    the place of dS.
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

    [003], eq. 44: each of four blocks takes M/4 at most, P because
    B_r B_c <= (M / 4d) d. B_r comes first, for K and V are loaded T / B_r
    times. ([003] asks for less than M/4 in eq. 43, but eq. 44 reaches it;
    M/4 is enough.)

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
    [FA] sets M/4 as in the forward pass; with tiles of that size the eight
    blocks need up to 2 M, which [003] holds to be an error.

    Parameters
    ----------
    memory, head_dim, head_dim_v
        As in `forward_tiles`.

    Returns
    -------
    block_q, block_k : int
    """
    return _tiles_within(memory, 8, head_dim, head_dim_v)


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
