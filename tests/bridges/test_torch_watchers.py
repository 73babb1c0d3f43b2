"""Watchers of tensors: export, checkpoints, subclasses."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_data import assert_equal, tensors  # noqa: E402

import cuflash.torch  # noqa: E402
from cuflash.api import attention as api_attention  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return cuflash.torch.attention(q * 2, k, v, causal=True).sin()


def test_exported_programs():
    inputs = tuple(tensors())
    program = torch.export.export(Model(), inputs)
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.cuflash.plain_attention.default in targets
    assert_arrays_equal(program.module()(*inputs), Model()(*inputs), "inputs")


def test_selective_checkpointing_saves_attention(monkeypatch):
    """Everything else is computed again in the backward pass."""
    found, original = [], api_attention.forward

    def forward(**arguments):
        found.append(arguments["return_lse"])
        return original(**arguments)

    def policy(context, operator, *arguments, **more):
        if operator is torch.ops.cuflash.plain_attention.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    monkeypatch.setattr(api_attention, "forward", forward)
    inputs = tensors(requires_grad=True)
    out = checkpoint(
        Model(),
        *inputs,
        use_reentrant=False,
        context_fn=functools.partial(
            create_selective_checkpoint_contexts, policy
        ),
    )
    got = torch.autograd.grad(out.sum(), inputs)
    assert found == [True]
    assert_equal(got, torch.autograd.grad(Model()(*inputs).sum(), inputs))


def test_a_class_of_tensors():
    inputs = tensors()
    both = [TwoTensor(x, x + 1) for x in inputs]
    out = cuflash.torch.attention(*both)
    assert type(out) is TwoTensor
    assert_arrays_equal(out.a, cuflash.torch.attention(*inputs), "out.a")
    moved = [x + 1 for x in inputs]
    assert_arrays_equal(out.b, cuflash.torch.attention(*moved), "out.b")
