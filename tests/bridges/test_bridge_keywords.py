"""Other libraries' keywords in calls of the bridges: the error names ours."""

import inspect
import re

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
jax = pytest.importorskip("jax", reason="needs JAX")

import cuflash.jax  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.request.readout import READOUTS  # noqa: E402

pytestmark = pytest.mark.slow

CALLS = [
    (cuflash.torch, "attention"),
    (cuflash.torch, "apply_rotary"),
    (cuflash.torch, "distributed_attention"),
    (cuflash.torch, "forward_kvcache"),
    (cuflash.torch, "merge_states"),
    *((cuflash.torch, name) for name in READOUTS),
    (cuflash.jax, "attention"),
    (cuflash.jax, "apply_rotary"),
    (cuflash.jax, "forward_kvcache"),
    (cuflash.jax, "merge_states"),
    *((cuflash.jax, name) for name in READOUTS),
]
CURES = {
    "attention": ("is_causal", "write causal"),
    "apply_rotary": ("rotary_interleaved", "write interleaved"),
    "distributed_attention": ("softmax_scale", "write scale"),
    "forward_kvcache": ("block_table", "write page_table"),
    "merge_states": ("out_b", "write more, without a name"),
    **dict.fromkeys(READOUTS, ("softmax_scale", "write scale")),
}


@pytest.mark.parametrize("module, call", CALLS)
def test_the_error_names_ours(module, call):
    function = getattr(module, call)
    known = inspect.signature(function).parameters
    assert "unknown" not in known
    needed = [None for x in known.values()
              if x.kind is x.POSITIONAL_OR_KEYWORD]  # fmt: skip
    others = {"group": None} if "group" in known else {}
    name, cure = CURES[call]
    words = f"{call}() got an unexpected keyword argument {name!r}: {cure}"
    with pytest.raises(TypeError, match=re.escape(words)):
        function(*needed, **others, **{name: None})


@pytest.mark.parametrize("module", [cuflash.torch, cuflash.jax])
def test_options_without_a_name(module):
    words = "takes 3 arguments without a name (x, cos, sin), got 4: name the"
    with pytest.raises(TypeError, match=re.escape(words)):
        module.apply_rotary(None, None, None, None)
