"""Calls of `cuflash.torch.attention` of a drawn case, and NumPy's of it."""

import torch
from torch_data import on_numpy

import cuflash
import cuflash.torch
from cuflash.torch.dtypes import from_numpy
from helpers.data import inputs, lse_gradient

DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


class TorchCase:
    """A case's tensors, and its results by either library.

    Each method returns those of torch; `expected_...` NumPy's.
    """

    def __init__(self, case):
        call = {n: x for n, x in case.call().items() if x is not None}
        tensors = {n: x for n, x in call.items() if hasattr(x, "dtype")}
        q, k, v, dout = inputs(case)
        given = {"q": q, "k": k, "v": v, **tensors}
        if case.offsets is not None:
            given |= {"q": q[0], "k": k[0], "v": v[0]}
            dout, dlse = dout[0], lse_gradient(case)[0]
        else:
            dlse = lse_gradient(case)
        self.tensors = {n: from_numpy(x) for n, x in given.items()}
        self.numbers = {n: x for n, x in call.items() if n not in tensors}
        self.wrt = [x for x in DIFFERENTIABLE if x in given]
        self.douts = [from_numpy(x) for x in (dout, dlse)]
        generator = torch.Generator().manual_seed(case.seed)
        self.moved = {
            name: torch.randn(x.shape, generator=generator).to(x.dtype)
            for name, x in [
                *((n, self.tensors[n]) for n in self.wrt),
                *zip(("out", "lse"), self.douts, strict=True),
            ]
        }
        if case.deterministic:
            self.numbers["deterministic"] = True

    def leaves(self):
        """The tensors; those that have gradients require them."""
        return {
            n: x.detach().clone().requires_grad_(n in self.wrt)
            for n, x in self.tensors.items()
        }

    def results(self, tensors=None):
        given = self.tensors if tensors is None else tensors
        return cuflash.torch.attention(
            **given, **self.numbers, return_lse=True
        )

    def results_and_gradients(self):
        leaves = self.leaves()
        results = self.results(leaves)
        wanted = [leaves[x] for x in self.wrt]
        return *results, *torch.autograd.grad(results, wanted, self.douts)

    def tangents(self):
        def call(*moving):
            moving = dict(zip(self.wrt, moving, strict=True))
            return self.results({**self.tensors, **moving})

        return torch.func.jvp(
            call,
            tuple(self.tensors[x] for x in self.wrt),
            tuple(self.moved[x] for x in self.wrt),
        )[1]

    def second_gradients(self):
        """Of the gradients, by name: of out and lse, ddout and ddlse."""
        leaves = self.leaves()
        douts = [x.clone().requires_grad_() for x in self.douts]
        wanted = [leaves[x] for x in self.wrt]
        first = torch.autograd.grad(
            self.results(leaves), wanted, douts, create_graph=True
        )
        moved = [self.moved[x] for x in self.wrt]
        found = torch.autograd.grad(first, [*wanted, *douts], moved)
        return dict(zip([*self.wrt, "out", "lse"], found, strict=True))

    # By NumPy's calls -------------------------------------------------------

    def _options(self, *without):
        numbers = {n: x for n, x in self.numbers.items() if n not in without}
        others = {n: x for n, x in self.tensors.items() if n not in "qkv"}
        return {**others, **numbers}

    def _inputs(self):
        return [self.tensors[x] for x in "qkv"]

    def expected_results(self, expected=on_numpy):
        return expected(
            cuflash.forward,
            *self._inputs(),
            **self._options("deterministic"),
            return_lse=True,
        )

    def expected_gradients(self, out, lse):
        dout, dlse = self.douts
        return on_numpy(
            cuflash.backward, dout, *self._inputs(), out, lse, dlse=dlse,
            **self._options(), **self._wanted("return_d"),
        )  # fmt: skip

    def expected_tangents(self):
        moved = {f"{x}_dot": self.moved[x] for x in self.wrt}
        return on_numpy(
            cuflash.jvp, *self._inputs(), **moved, return_lse=True,
            **self._options("deterministic"),
        )[2:]  # fmt: skip

    def expected_second_gradients(self):
        out, lse = self.expected_results()
        dout, dlse = self.douts
        found = on_numpy(
            cuflash.double_backward,
            *(self.moved[x] for x in "qkv"),
            dout, *self._inputs(), out, lse, dlse=dlse, return_ddlse=True,
            **{f"dd{x}": self.moved[x] for x in self.wrt[3:]},
            **self._options(), **self._wanted("return_d2"),
        )  # fmt: skip
        names = ("q", "k", "v", "out", *self.wrt[3:], "lse")
        return dict(zip(names, found, strict=True))

    def _wanted(self, prefix):
        return {f"{prefix}{name}": True for name in self.wrt[3:]}
