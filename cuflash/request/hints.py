"""What takes PyTorch's and JAX's arrays in place of a call: for messages.

A test looks up every name that stands here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cuflash.request.readout import READOUTS


class Bridges(NamedTuple):
    """What takes tensors, and what takes JAX's arrays; "" if nothing does."""

    torch: str
    jax: str


_BY_CALL = {
    "forward": Bridges("cuflash.torch.attention", "cuflash.jax.attention"),
    "backward": Bridges(
        "torch.autograd.grad of cuflash.torch.attention",
        "jax.vjp of cuflash.jax.attention",
    ),
    "vjp": Bridges(
        "torch.func.vjp of cuflash.torch.attention",
        "jax.vjp of cuflash.jax.attention",
    ),
    "jvp": Bridges(
        "torch.func.jvp of cuflash.torch.attention",
        "jax.jvp of cuflash.jax.attention",
    ),
    "double_backward": Bridges(
        "torch.autograd.grad of cuflash.torch.attention with "
        "create_graph=True",
        "jax.vjp of jax.grad of cuflash.jax.attention",
    ),
    "forward_kvcache": Bridges(
        "cuflash.torch.forward_kvcache", "cuflash.jax.forward_kvcache"
    ),
    "merge_states": Bridges(
        "cuflash.torch.merge_states", "cuflash.jax.merge_states"
    ),
    "apply_rotary": Bridges(
        "cuflash.torch.apply_rotary", "cuflash.jax.apply_rotary"
    ),
    "distributed": Bridges("cuflash.torch.distributed_attention", ""),
    **{x: Bridges(f"cuflash.torch.{x}", f"cuflash.jax.{x}") for x in READOUTS},
    **{
        f"{x}_backward": Bridges(
            f"torch.autograd.grad of cuflash.torch.{x}",
            f"jax.vjp of cuflash.jax.{x}",
        )
        for x in READOUTS
    },
}


def on_the_cpu(call: str, name: str, array: Any) -> str:
    """What to do with an argument of another library on the CPU."""
    library = type(array).__module__.partition(".")[0]
    bridges = _BY_CALL[call]
    found = {"torch": bridges.torch, "jax": bridges.jax}
    bridge = found.get({"jaxlib": "jax"}.get(library, library), "")
    taken = f"{bridge} takes it; or " if bridge else ""
    return f" ({taken}pass np.from_dlpack({name}))"


def requiring_grad(call: str, name: str) -> str:
    """What to do with a tensor that requires grad."""
    detached = f"pass {name}.detach()"
    if call == "forward_kvcache":
        return f"attention over caches has no gradients: {detached}"
    if call == "forward":
        detached += " and call cuflash.backward"
    if call in READOUTS:
        detached += f" and call cuflash.{call}_backward"
    bridge = _BY_CALL[call].torch
    return f"for automatic differentiation write {bridge} (or {detached})"


def tracer(call: str) -> str:
    """What to do in place of a call with a tracer of JAX."""
    bridge = _BY_CALL[call].jax
    if bridge:
        return f"in jax.jit, jax.grad and jax.vmap write {bridge}"
    return "make this call outside jax.jit, jax.grad and jax.vmap"


def missing(bridge: str, name: str) -> str:
    """What to write for a call of cuflash that a bridge does not have."""
    found = _BY_CALL.get(name)
    written = getattr(found, bridge) if found else ""
    return f": write {written}" if written else ""
