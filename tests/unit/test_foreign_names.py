"""Keywords of other libraries: the error names ours."""

import inspect
import re
from pathlib import Path

import pytest

import cuflash
import cuflash.distributed
from cuflash.api import foreign_names

PAGE = Path(__file__).parents[2] / "docs/guide/migrating.md"
CALLS = {
    "forward": cuflash.forward,
    "backward": cuflash.backward,
    "vjp": cuflash.vjp,
    "jvp": cuflash.jvp,
    "double_backward": cuflash.double_backward,
    "merge_states": cuflash.merge_states,
    "forward_kvcache": cuflash.forward_kvcache,
    "apply_rotary": cuflash.apply_rotary,
    "distributed.forward": cuflash.distributed.forward,
    "distributed.backward": cuflash.distributed.backward,
}
OURS = {
    x for call in CALLS.values() for x in inspect.signature(call).parameters
}


def message(call, name):
    function = CALLS[call]
    needed = [
        None
        for x in inspect.signature(function).parameters.values()
        if x.kind is x.POSITIONAL_OR_KEYWORD
    ]
    others = {"group": None} if call.startswith("distributed") else {}
    with pytest.raises(TypeError) as caught:
        function(*needed, **others, **{name: None})
    assert not isinstance(caught.value, cuflash.CuflashError)
    start = f"cuflash.{call}() got an unexpected keyword argument '{name}'"
    assert str(caught.value).startswith(start)
    return str(caught.value)[len(start) :]


@pytest.mark.parametrize("call", CALLS)
def test_each_call_knows_them(call):
    known = inspect.signature(CALLS[call]).parameters
    assert "unknown" not in known
    cure = "write causal, aligned at the end: the last query sees the last key"
    said = message(call, "is_causal")
    assert said == (f": {cure}" if "causal" in known else "")


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        ("forward", "attn_mask", ": write mask, if it is boolean"),
        ("forward", "block_table", ": pages are for cuflash.forward_kvcache"),
        ("forward_kvcache", "block_table", ": write page_table"),
        ("forward_kvcache", "k", ": write k_new, the keys to append"),
        ("forward_kvcache", "interleaved", ": write rotary_interleaved"),
        ("forward_kvcache", "mask", ": it is an argument of cuflash.forward"),
        ("apply_rotary", "rotary_interleaved", ": write interleaved"),
        ("forward", "enable_gqa", ": grouped heads need no argument"),
        ("forward", "deterministic", ": it is an argument of cuflash."),
        ("forward", "stream", ": a call runs on the current stream: write"),
        ("forward", "casual", ": did you mean causal?"),
        ("merge_states", "out_b", ": write more, without a name"),
        ("merge_states", "more", ": pass its arrays without a name"),
        ("jvp", "zzz", ""),
    ],
)
def test_cure(call, name, said):
    assert message(call, name).startswith(said)
    assert bool(said) == bool(message(call, name))


def test_a_readouts_gradient_has_its_own_call():
    with pytest.raises(TypeError, match=r"argument of cuflash\.weights_back"):
        cuflash.weights(None, None, None, return_dmod=())


def test_options_have_names():
    with pytest.raises(TypeError, match="takes 3 arguments without a name"):
        cuflash.forward(None, None, None, True)
    with pytest.raises(
        TypeError, match=r"k_dot, v_dot\), got 7: name the oth"
    ):
        cuflash.jvp(*[None] * 7)


def rows():
    """(arguments, our words) of the rows that name arguments, by table."""
    text = PAGE.read_text(encoding="utf-8").partition("| `attn_bias` | ours")
    for line in text[0].splitlines():
        cells = [x.strip() for x in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 2 or "attention" in line:
            continue
        names = re.findall(r"`(\w+)(?:=[^`]*)?`", cells[0])
        if names and not re.search(r"flash_attn|merge_att", cells[0]):
            yield names, cells[1]


def test_the_table_is_that_of_the_guide():
    """Of arguments with other names than ours."""
    found = {}
    for names, words in rows():
        for name in names:
            if name not in OURS or name in ("k", "v") and "k_new" in words:
                found.setdefault(name, "")
                found[name] += words
    assert len(found) > 15
    assert found.keys() <= foreign_names.TABLE.keys()
    for name, words in found.items():
        ours = [x for x, _ in foreign_names.TABLE[name]]
        assert any(x in words for x in ours), name
