"""A fault of each row of CONTRIBUTING's first table, in a file of the row.

Small, and met early by the row's tests; none keeps anything from compiling.
Change what a fault replaces if the code does.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """Text that stands once in a file, and what replaces it.

    needs : packages without which the row's tests skip themselves.
    """

    file: str
    text: str
    instead: str
    needs: tuple[str, ...] = ()


TORCH, JAX = ("torch",), ("jax",)

FAULTS = {
    "arguments, error messages": Fault(
        "cuflash/request/checks.py",
        "0.0 <= value < 1.0",
        "0.0 <= value <= 1.0",
    ),
    "which kernel and tile a call gets": Fault(
        "cuflash/plans/nearest_tiles.py",
        "far.sort(key=lambda pair: pair[0])",
        "far.sort(key=lambda pair: -pair[0])",
    ),
    "launches, copies, outputs": Fault(
        "cuflash/request/layouts.py",
        "elements = 16 // layout",
        "elements = 8 // layout",
    ),
    "calls on NumPy arrays": Fault(
        "cuflash/backends/numpy/kinds.py",
        "score = abs(scale) *",
        "score = 1e-9 * abs(scale) *",
    ),
    "calls on CuPy arrays": Fault(
        "cuflash/backends/cupy.py",
        "stream > 1 else 0",
        "stream > 0 else 0",
    ),
    "compilation, cache, import": Fault(
        "cuflash/build/cache.py",
        "if not _is_whole(path):  # another",
        "if True:  # another",
    ),
    "a kernel of forward or backward": Fault(
        "cuflash/kernels/fma/forward.cu",
        "if (MASKED && !visible(i, lane_column() + j * LANE_COLUMNS))",
        "if (MASKED && !visible(i, lane_column() + j))",
    ),
    "an option in the kernels": Fault(
        "cuflash/kernels/common/mask.cuh",
        "CAUSAL ? clamp(query + (seqlen_k - seqlen_q) + 1,",
        "CAUSAL ? clamp(query + (seqlen_k - seqlen_q),",
    ),
    "the check that users run": Fault(
        "cuflash/check/bounds.py",
        "y.dv = turned(p * (y.eta + terms + stored)",
        "y.dv = turned(p * (1 + y.eta + terms + stored)",
    ),
    "a user's score and mask": Fault(
        "cuflash/expressions/intervals.py",
        '"subtract": lambda a, b: (a[0] - b[1], a[1] - b[0])',
        '"subtract": lambda a, b: (a[0] - b[0], a[1] - b[1])',
    ),
    "what runs before and after them": Fault(
        "cuflash/kernels/prepare/delta.cu", "sum -= static", "sum += static"
    ),
    "a derivative's kernel": Fault(
        "cuflash/kernels/sm80/jvp.cu",
        "if constexpr (MASKED) apply_mask(s, w,",
        "if constexpr (PAIRWISE) apply_mask(s, w,",
    ),
    "weights, their sums, entropies": Fault(
        "cuflash/kernels/readouts/row_sums.cuh",
        "return a + b;",
        "return a - b;",
    ),
    "decoding and caches": Fault(
        "cuflash/kernels/decode/forward_simt.cu",
        "int distance = LANES_OF_PAIR; distance",
        "int distance = 2 * LANES_OF_PAIR; distance",
    ),
    "the reference": Fault(
        "reference/attention.py", "head_dim**-0.5", "head_dim**-1.0"
    ),
    "the emulator": Fault(
        "cuflash/backends/emulator/faults.py",
        "itertools.dropwhile(lambda p: p[0] not in",
        "itertools.takewhile(lambda p: p[0] not in",
    ),
    "several devices, merging": Fault(
        "cuflash/distributed/accumulate.py",
        "self.ranges[i], first, others, target",
        "self.ranges[i], first, others[1:], target",
    ),
    "PyTorch: masks, models": Fault(
        "cuflash/torch/sdpa.py",
        "if not at_end and seqlen_q",
        "if at_end and seqlen_q",
        TORCH,
    ),
    "PyTorch: calls, gradients, transforms": Fault(
        "cuflash/torch/checks.py",
        "(list, tuple, int, float)",
        "(tuple, int, float)",
        TORCH,
    ),
    "PyTorch: launches": Fault(
        "cuflash/torch/backend.py",
        "strides[0] * max(size, 1)",
        "strides[0] * size",
        TORCH,
    ),
    "PyTorch: `torch.compile`": Fault(
        "cuflash/torch/fakes.py",
        "out = q.new_empty((*q.shape[:-1], v.shape[-1]))",
        "out = q.new_empty(q.shape)",
        TORCH,
    ),
    "flash-attn's names": Fault(
        "cuflash/flash_attn/arguments.py",
        "if return_softmax_lse else out",
        "if return_softmax_lse else out[0]",
        TORCH,
    ),
    "JAX": Fault(
        "cuflash/jax/cpu.py",
        "into[name][...] = x",
        'into[name][...] = 1.4427 * x if name == "lse" else x',
        JAX,
    ),
    "JAX: derivatives, vmap of them": Fault(
        "cuflash/jax/derivatives.py",
        "operands, *results, names=names, wrt=tuple(moved),",
        "operands, *results, names=names, wrt=tuple(moved)[::-1],",
        JAX,
    ),
    "JAX: launches": Fault(
        "cuflash/jax/cuda.py",
        "x.slot - self._num_inputs",
        "x.slot - self._num_inputs - 1",
        JAX,
    ),
    "signatures of both bridges": Fault(
        "cuflash/torch/rotary.py",
        "    *positional: NoReturn,\n",
        "    *,\n",
        ("torch", "jax"),
    ),
    "README, docs, this page": Fault(
        "docs/guide/options.md", "-8 * xp.arange(1", "-7 * xp.arange(1"
    ),
    "a script": Fault(
        "scripts/affected.py",
        "done |= ran.ran[file]",
        "done = ran.ran[file]",
    ),
    "how tests compare, draw, are chosen": Fault(
        "tests/helpers/compare.py", "(~within).sum() - 1", "(~within).sum()"
    ),
    "what imports what; make, packages": Fault(
        "Makefile", "ruff format --check", "ruff format"
    ),
}
