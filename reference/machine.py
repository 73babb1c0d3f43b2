r"""A machine of a few registers, and what locality saves on it.

Arrays are in DRAM, arithmetic works on registers, and LOAD and STORE copy
between them. A trace is a list of instructions; `run` executes it and counts.
The register file models a GPU's fast memory, DRAM its slow memory ([000],
"The tile abstraction"): an order that saves a LOAD here saves the transfer of
a tile there::

    2 x 2 matrix product        registers   LOADs   cycles   intensity
    matmul                              3      16       28     8 / 20
    inner_product_matmul                3      13       25     8 / 17
    outer_product_matmul                6      10       22     8 / 14
    wide_inner_product_matmul           6       8       20     8 / 12

    softmax of n numbers                 registers   LOADs   STOREs
    safe_softmax                                 3      3n        n
    online_softmax                               4      2n        n

The intensity, which [000] asks for in a quiz, is the number of arithmetic
instructions per element that a LOAD or STORE moves: `intensity` continues
with larger matrices and attention.

Source: [000], problems 1 to 5. There LOAD, STORE, MAC and MAC_Z take one
cycle and the other instructions have no stated cost; here each takes one.

Example
-------
An element of a matrix product, and what the machine did:

>>> import numpy as np
>>> from cuflash.reference import machine
>>> trace = machine.dot_product(0, 0)
>>> print(trace)
  1  LOAD a[0][0], R0
  2  LOAD b[0][0], R1
  3  MAC_Z R0, R1, R2
  4  LOAD a[0][1], R0
  5  LOAD b[1][0], R1
  6  MAC R0, R1, R2, R2
  7  STORE R2, c[0][0]
>>> a, b = np.arange(4.0).reshape(2, 2), np.ones((2, 2))
>>> done = machine.run(trace, {"a": a, "b": b, "c": 0 * a}, registers=3)
>>> print(done)
7 cycles (LOAD 4, MAC_Z 1, MAC 1, STORE 1), 3 registers
>>> print(done.dram["c"])
[[1. 0.]
 [0. 0.]]
>>> print(done.intensity)  # MACs per LOAD or STORE
0.4

The fourth register of online softmax saves a pass over x:

>>> x = {"x": np.log([1.0, 2.0, 5.0]), "out": np.zeros(3)}
>>> for softmax, registers in (
...     (machine.safe_softmax, 3), (machine.online_softmax, 4)
... ):
...     done = machine.run(softmax(3), x, registers)
...     print(done.dram["out"].round(3), done.loads, done.stores)
[0.125 0.25  0.625] 9 3
[0.125 0.25  0.625] 6 3
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

# ---------------------------------------------------------------- the machine


@dataclass(frozen=True)
class Address:
    """An element of an array in DRAM; a[0][1]: ``Address("a", (0, 1))``."""

    array: str
    index: tuple[int, ...]

    def __str__(self) -> str:
        return self.array + "".join(f"[{i}]" for i in self.index)


@dataclass(frozen=True)
class Instruction:
    """An operation, its sources and its target.

    LOAD reads an address and writes a register, STORE the reverse; all other
    operations read and write registers only. An int is a register's number.
    """

    name: str
    sources: tuple[int | Address, ...]
    target: int | Address

    def __str__(self) -> str:
        operands = [
            f"R{x}" if isinstance(x, int) else str(x)
            for x in (*self.sources, self.target)
        ]
        return f"{self.name} " + ", ".join(operands)


class Trace(list[Instruction]):
    """A list of instructions; printed, a numbered line for each."""

    def __str__(self) -> str:
        return "\n".join(f"{i:3}  {x}" for i, x in enumerate(self, 1))

    __repr__ = __str__


# The instruction sets of [000]: the first two for matmul, the others for
# softmax. Rd is the last operand of each. The MAC of [000] always multiplies
# R0 by R1; here it takes any registers, as its softmax instructions do.
OPERATIONS: Mapping[str, Callable[..., float]] = {
    "MAC_Z": lambda a, b: a * b,  # MAC_Z Ra, Rb, Rd: Rd = Ra * Rb
    "MAC": lambda a, b, c: a * b + c,  # MAC Ra, Rb, Rc, Rd
    "MAX": max,
    "SUB": lambda a, b: a - b,
    "EXP": math.exp,
    "ADD": lambda a, b: a + b,
    "MUL": lambda a, b: a * b,
    "DIV": lambda a, b: a / b,
    "MOV": lambda a: a,
}


def load(array: str, *index: int, to: int) -> Instruction:
    """LOAD src, Rd: Rd = DRAM[src]."""
    return Instruction("LOAD", (Address(array, index),), to)


def store(register: int, array: str, *index: int) -> Instruction:
    """STORE Rs, dst: DRAM[dst] = Rs."""
    return Instruction("STORE", (register,), Address(array, index))


def op(name: str, *registers: int) -> Instruction:
    """Return an instruction of `OPERATIONS`; the last register is Rd."""
    return Instruction(name, registers[:-1], registers[-1])


@dataclass(frozen=True)
class Run:
    """The result of running a trace.

    Attributes
    ----------
    dram : dict of str to ndarray of float64
        The arrays after the trace.
    counts : Counter
        Number of executions of each operation, by name.
    registers : int
        Number of registers written.
    """

    dram: dict[str, np.ndarray]
    counts: Counter[str]
    registers: int

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {n}" for name, n in self.counts.items())
        return f"{self.cycles} cycles ({counts}), {self.registers} registers"

    @property
    def cycles(self) -> int:
        """One per instruction."""
        return self.counts.total()

    @property
    def loads(self) -> int:
        """Elements read from DRAM."""
        return self.counts["LOAD"]

    @property
    def stores(self) -> int:
        """Elements written to DRAM."""
        return self.counts["STORE"]

    @property
    def intensity(self) -> float:
        """Arithmetic instructions per element loaded or stored.

        [000], "Arithmetic intensity: inner product vs. outer product". MOV
        is no arithmetic.
        """
        moved = self.loads + self.stores
        return (self.cycles - self.counts["MOV"] - moved) / moved


def run(
    trace: Iterable[Instruction],
    dram: Mapping[str, np.ndarray],
    registers: int,
) -> Run:
    """Execute a trace and count its instructions.

    Parameters
    ----------
    trace : iterable of Instruction
    dram : mapping of str to array_like
        The arrays that the trace accesses; copied, not modified.
    registers : int
        Number of registers of the machine.

    Returns
    -------
    Run

    Raises
    ------
    ValueError
        If an instruction uses a register that does not exist, or reads one
        that was never written.
    """
    dram = {name: np.array(x, np.float64) for name, x in dram.items()}
    file: dict[int, float] = {}
    counts: Counter[str] = Counter()
    for instruction in trace:
        _check(instruction, file, registers)
        sources = [_read(x, file, dram) for x in instruction.sources]
        if instruction.name in ("LOAD", "STORE"):
            (result,) = sources
        else:
            result = OPERATIONS[instruction.name](*sources)
        target = instruction.target
        if isinstance(target, Address):
            dram[target.array][target.index] = result
        else:
            file[target] = result
        counts[instruction.name] += 1
    return Run(dram, counts, len(file))


def _check(
    instruction: Instruction, file: Mapping[int, float], registers: int
) -> None:
    """Raise ValueError for a register that is absent or unwritten."""
    for x in (*instruction.sources, instruction.target):
        if isinstance(x, int) and not 0 <= x < registers:
            raise ValueError(
                f"{instruction}: there is no R{x} among {registers} registers"
            )
    for x in instruction.sources:
        if isinstance(x, int) and x not in file:
            raise ValueError(f"{instruction}: R{x} was never written")


def _read(
    source: int | Address,
    file: Mapping[int, float],
    dram: Mapping[str, np.ndarray],
) -> float:
    """Return the number in a register or in DRAM."""
    if isinstance(source, Address):
        return float(dram[source.array][source.index])
    return file[source]


# ------------------------------------------- C = A B of 2 x 2 matrices
#
# R0 and R1 hold the operands of MAC, the other registers the sums.


def dot_product(i: int, j: int, order: Iterable[int] = (0, 1)) -> Trace:
    r"""Compute :math:`c_{ij} = \sum_k a_{ik} b_{kj}` in 7 cycles.

    [000], problem 1: 4 LOADs, 2 MACs, 1 STORE, 3 registers. The sum stays
    in R2 while the next operands are loaded into R0 and R1.

    Parameters
    ----------
    i, j : int
        Row and column.
    order : iterable of int, optional
        The values of k, in the order in which terms are added.
    """
    trace = Trace()
    for step, k in enumerate(order):
        trace += [load("a", i, k, to=0), load("b", k, j, to=1)]
        trace += [op("MAC", 0, 1, 2, 2) if step else op("MAC_Z", 0, 1, 2)]
    trace += [store(2, "c", i, j)]
    return trace


def matmul() -> Trace:
    """Compute the four elements one by one: 28 cycles, 3 registers.

    [000], problem 2: 4 * 7 cycles, nothing reused.
    """
    return Trace(
        instruction
        for i in range(2)
        for j in range(2)
        for instruction in dot_product(i, j)
    )


def inner_product_matmul() -> Trace:
    """Compute the four elements in an order that reuses operands: 25 cycles.

    [000], problem 2: 13 LOADs, 3 registers. Each element starts with an
    operand that the previous one left in a register: a01 for c00 and c01,
    b01 for c01 and c11, a11 for c11 and c10.
    """
    return without_repeated_loads(
        [
            *dot_product(0, 0, order=(0, 1)),
            *dot_product(0, 1, order=(1, 0)),
            *dot_product(1, 1, order=(0, 1)),
            *dot_product(1, 0, order=(1, 0)),
        ]
    )


def outer_product_matmul() -> Trace:
    r"""Add two outer products: 22 cycles with 6 registers.

    .. math:: C = \sum_k A_{:k} B_{k:}

    [000], problem 3: 10 LOADs, 8 MACs, 4 STOREs. All four sums stay in
    registers; they are visited in a circular order, in which consecutive
    ones share an operand.
    """
    sums = {(0, 0): 2, (0, 1): 3, (1, 1): 5, (1, 0): 4}
    trace = Trace()
    for k in range(2):
        for (i, j), c in sums.items():
            trace += [load("a", i, k, to=0), load("b", k, j, to=1)]
            trace += [op("MAC", 0, 1, c, c) if k else op("MAC_Z", 0, 1, c)]
    trace += [store(sums[i, j], "c", i, j) for i in (0, 1) for j in (0, 1)]
    return without_repeated_loads(trace)


def wide_inner_product_matmul() -> Trace:
    """Compute inner products with 6 registers too: 20 cycles.

    [000] poses this as a quiz. B and one row of A fill the registers (MAC
    takes operands from any of them), and each sum overwrites an operand that
    is no longer needed. So every element is loaded once: 8 LOADs, the
    minimum.
    """
    a0, a1, b00, b10, b01, b11 = range(6)
    c00 = b11  # b11 is not loaded yet
    c01 = a0  # a00 and a01 are no longer needed
    c11 = b01
    c10 = b00
    return Trace(
        [
            load("a", 0, 0, to=a0),
            load("b", 0, 0, to=b00),
            op("MAC_Z", a0, b00, c00),
            load("a", 0, 1, to=a1),
            load("b", 1, 0, to=b10),
            op("MAC", a1, b10, c00, c00),
            store(c00, "c", 0, 0),
            load("b", 0, 1, to=b01),
            load("b", 1, 1, to=b11),
            op("MAC_Z", a0, b01, c01),
            op("MAC", a1, b11, c01, c01),
            store(c01, "c", 0, 1),
            load("a", 1, 0, to=a0),
            load("a", 1, 1, to=a1),
            op("MAC_Z", a0, b01, c11),
            op("MAC", a1, b11, c11, c11),
            store(c11, "c", 1, 1),
            op("MAC_Z", a0, b00, c10),
            op("MAC", a1, b10, c10, c10),
            store(c10, "c", 1, 0),
        ]
    )


def without_repeated_loads(trace: Iterable[Instruction]) -> Trace:
    """Remove each LOAD of an address that its register already holds.

    Valid for traces that never load an address after storing to it.
    """
    held: dict[int | Address, int | Address | None] = {}
    kept = Trace()
    for instruction in trace:
        source: int | Address | None = None
        if instruction.name == "LOAD":
            (source,) = instruction.sources
            if held.get(instruction.target) == source:
                continue
        held[instruction.target] = source
        kept.append(instruction)
    return kept


# ------------------------------------------------------- out = softmax(x)
#
# R0 is scratch. Between passes R1 holds the maximum m, R2 the sum s.


def safe_softmax(n: int) -> Trace:
    """Compute softmax in three passes: 3n LOADs, n STOREs, 3 registers.

    [000], problem 4.

    Parameters
    ----------
    n : int
        Length of x, 1 or more.
    """
    return Trace([*max_pass(n), *sum_pass(n), *normalise_pass(n)])


def online_softmax(n: int) -> Trace:
    """Compute softmax in two passes: 2n LOADs, n STOREs, 4 registers.

    [000], problem 5. The fourth register saves a pass over x.

    Parameters
    ----------
    n : int
        Length of x, 1 or more.
    """
    return Trace([*online_pass(n), *normalise_pass(n)])


def max_pass(n: int) -> Trace:
    r"""Leave :math:`m = \max_j x_j` in R1: n LOADs ([000], pass 1)."""
    trace = Trace([load("x", 0, to=1)])
    for i in range(1, n):
        trace += [load("x", i, to=0), op("MAX", 0, 1, 1)]
    return trace


def sum_pass(n: int) -> Trace:
    r"""Leave :math:`s = \sum_j e^{x_j - m}` in R2: n LOADs ([000], pass 2).

    The exponentials are added at once and never stored.
    """
    trace = Trace()
    for i in range(n):
        trace += [load("x", i, to=0), op("SUB", 0, 1, 0), op("EXP", 0, 0)]
        trace += [op("ADD", 2, 0, 2) if i else op("MOV", 0, 2)]
    return trace


def normalise_pass(n: int) -> Trace:
    r"""Store :math:`e^{x_j - m} / s`: n LOADs, n STOREs ([000], pass 3)."""
    trace = Trace()
    for i in range(n):
        trace += [load("x", i, to=0), op("SUB", 0, 1, 0), op("EXP", 0, 0)]
        trace += [op("DIV", 0, 2, 0), store(0, "out", i)]
    return trace


def online_pass(n: int) -> Trace:
    r"""Leave m in R1 and s in R2 after one pass: n LOADs.

    .. math::
        m' &= \max(m, x) \\
        s' &= s e^{m - m'} + e^{x - m'}

    [000], problem 5. R3 keeps the old m, which the factor needs.
    """
    trace = Trace(
        [
            load("x", 0, to=0),
            op("MOV", 0, 1),  # m = x0
            op("SUB", 0, 1, 0),
            op("EXP", 0, 0),
            op("MOV", 0, 2),  # s = e^0
        ]
    )
    for i in range(1, n):
        trace += [
            load("x", i, to=0),
            op("MOV", 1, 3),
            op("MAX", 0, 1, 1),  # m'
            op("SUB", 3, 1, 3),
            op("SUB", 0, 1, 0),
            op("EXP", 3, 3),  # e^(m - m')
            op("EXP", 0, 0),  # e^(x - m')
            op("MUL", 2, 3, 2),
            op("ADD", 2, 0, 2),  # s'
        ]
    return trace
