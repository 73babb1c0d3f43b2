"""An option is declared once: no module outside these names one.

Identifiers, keywords and strings count; comments and docstrings do not.
"""

from pathlib import Path

import cuflash
from cuflash.request import options
from helpers.python_text import words_of

PACKAGE = Path(cuflash.__file__).parent
BRIDGES = "torch", "jax", "flash_attn", "distributed"
NAMES = {x for row in options.TABLE for x in (row.name, row.part_of) if x}

# By the beginning of a module's path: why options are named there; which,
# unless all may be.
PLACES = {
    # Declarations.
    "request/options": ("the table",),
    "request/problem": ("a field for each",),
    "request/checks": ("one check each", "window softcap dropout seed"),
    "request/fields": (
        "of structs", "window softcap dropout max_seqlen_q max_seqlen_k",
    ),
    "request/softcap": ("how its tanh is computed", "softcap dropout"),
    "api/types": ("type checkers read text",),
    "api/attention": ("overloads", "return_dbias return_dsink"),
    "api/vjp": ("arguments of its own", "return_dbias return_dsink"),
    "api/kvcache": ("packs queries alone", "cu_seqlens_q max_seqlen_q"),
    "api/foreign_names": ("what others call ours",),
    # Values that the host reads, and rules between arguments.
    "api/arrays": ("offsets are checked", "cu_seqlens_q"),
    "request/validate": ("rules between arguments",),
    # Decisions that were measured for one option.
    "plans/tiles": ("tuned tiles", "window segment_ids"),
    "plans/plan": (
        "tuned tiles", "window segment_ids max_seqlen_q max_seqlen_k",
    ),
    "plans/steps": (
        "dtypes, launches", "bias window segment_ids max_seqlen_k return_dsink"
    ),
    "plans/sm90": (
        "memory, registers", "alibi_slopes bias mask segment_ids window",
    ),
    # What runs.
    "launch": ("what structs hold, what is returned",),
    "backends/numpy": ("the equations",),
    # Other meanings of a word.
    "__init__": ("builders", "cu_seqlens segment_ids"),
    "api/builders": ("builders", "cu_seqlens segment_ids mask"),
    "backends/emulator": ("of schedules, of addresses", "seed mask"),
}  # fmt: skip


MODULES = {
    file.relative_to(PACKAGE).with_suffix("").as_posix(): file
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.relative_to(PACKAGE).parts[0] not in BRIDGES
}


def place_of(module):
    """Return the entry of a module, "" without one."""
    found = (x for x in PLACES if module.startswith(x))
    return max(found, key=len, default="")


def named_outside(module):
    """Return the options that a module names though it may not."""
    _, *some = PLACES.get(place_of(module), ("", ""))
    may = set(some[0].split()) if some else NAMES
    return (NAMES & words_of(MODULES[module].read_text())) - may


def test_options_are_named_in_their_places():
    found = {module: named_outside(module) for module in MODULES}
    assert {module: names for module, names in found.items() if names} == {}


def test_places_exist():
    assert set(PLACES) <= {place_of(module) for module in MODULES}
