"""Calls of `cuflash.torch.attention` of a case."""

import torch
from bridge_cases import BridgeCase

import cuflash.torch
from cuflash.torch.dtypes import from_numpy


class TorchCase:
    """A case's tensors, and torch's results; those of NumPy are `on_numpy`'s.

    Each method returns tensors in the order of `BridgeCase`'s.
    """

    def __init__(self, case):
        call = self.on_numpy = BridgeCase(case)
        self.numbers, self.wrt = call.numbers, call.wrt
        self.tensors = {n: from_numpy(x) for n, x in call.arrays.items()}
        self.douts = [*map(from_numpy, call.douts)]
        self.moved = [from_numpy(call.moved[x]) for x in self.wrt]

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

        given = tuple(self.tensors[x] for x in self.wrt)
        return torch.func.jvp(call, given, tuple(self.moved))[1]

    def second_gradients(self):
        leaves = self.leaves()
        wanted = [leaves[x] for x in self.wrt]
        douts = [x.clone().requires_grad_() for x in self.douts]
        first = torch.autograd.grad(
            self.results(leaves), wanted, douts, create_graph=True
        )
        return torch.autograd.grad(first, [*wanted, *douts], self.moved)
