"""An option is declared once: no module outside these names one.

Identifiers, keywords and strings count; comments and docstrings do not.
"""

from pathlib import Path

import cuflash
from cuflash.request import options
from helpers.python_text import words_of

PACKAGE = Path(cuflash.__file__).parent
NAMES = {x for row in options.TABLE for x in (row.name, row.part_of) if x}

# By the beginning of a module's path: why options are named there; which,
# unless all may be.
PLACES = {
    # Declarations.
    "request/options": ("the table",),
    "request/problem": ("a field for each",),
    "request/traced": (
        "from functions to graphs; advice on arrays given as functions",
        "score_mod mask mask_mod mod_arrays return_dmod",
    ),
    "request/mod_tangents": (
        "tangents of its arrays, their gradients", "mod_arrays return_dmod",
    ),
    "expressions": (
        "the two roles, what built-in options compute, advice",
        "bias mask mask_mod score_mod softcap",
    ),
    "request/checks": ("one check each", "window softcap dropout seed"),
    "request/pair_bias": ("theirs", "bias mask"),
    "request/fields": (
        "of structs", "window softcap dropout max_seqlen_q max_seqlen_k",
    ),
    "request/softcap": ("how its tanh is computed", "softcap dropout"),
    "api/types": ("type checkers read text",),
    "api/tile_mask": ("its arguments", "mask mask_mod mod_arrays"),
    "api/attention": (
        "overloads, a TileMask",
        "mask_mod return_dbias return_dsink return_dmod",
    ),
    "api/readout": ("overloads, gradients by name", "return_dmod"),
    "api/reads": ("reads of the two roles", "mask_mod score_mod"),
    "api/derivatives": ("a TileMask", "mask_mod"),
    "api/lse_of_call": (
        "the bound of a score", "alibi_slopes dropout score_mod seed softcap",
    ),
    "api/vjp": (
        "arguments of its own", "return_dbias return_dsink return_dmod",
    ),
    "api/kvcache": ("packs queries alone", "cu_seqlens_q max_seqlen_q"),
    "api/foreign_names": (
        "what others call ours",
        "bias cu_seqlens_q cu_seqlens_k dropout mask mask_mod window",
    ),
    # Values that the host reads, and rules between arguments.
    "api/arrays": ("offsets are checked", "cu_seqlens_q"),
    "request/validate/attention": (
        "bounds, packing, a shape, a seed, directions, what moves",
        "alibi_slopes bias cu_seqlens cu_seqlens_q score_mod seed window",
    ),
    "request/validate/readouts": ("weights are before it", "dropout"),
    "request/validate/functions": (
        "what built-in options give", "mask_mod score_mod softcap window",
    ),
    "request/validate/host_values": (
        "offsets are checked",
        "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    ),
    "request/validate/kvcache": (
        "bounds, packed queries", "cu_seqlens_q max_seqlen_q window",
    ),
    "request/validate/option_arrays": (
        "packing, advice on dtypes", "bias cu_seqlens_q mask",
    ),
    "request/validate/scalars": (
        "a seed of dropout, bounds", "dropout seed window",
    ),
    # Decisions that were measured for one option.
    "plans/tiles": ("tuned tiles", "bias window segment_ids"),
    "plans/plan": (
        "tuned tiles",
        "mask_mod max_seqlen_k max_seqlen_q segment_ids window",
    ),
    "plans/append": ("whether queries are in order", "window"),
    "plans/expression": (
        "the kernels' texts, on what flags of tiles depend",
        "score_mod mask_mod mod_arrays return_dmod segment_ids window",
    ),
    "plans/steps": (
        "dtypes, launches",
        "bias mask mask_mod window segment_ids max_seqlen_k return_dsink",
    ),
    "plans/sm90_double_backward": (
        "the one that it has, and what it lacks", "return_dmod score_mod",
    ),
    "plans/sm90_jvp": ("the one that it has", "score_mod"),
    "plans/sm90": (
        "memory, registers, a softcap as a score",
        "alibi_slopes bias mask mask_mod return_dbias return_dmod score_mod"
        " segment_ids softcap window",
    ),
    # What runs.
    "launch/attention": (
        "what is returned",
        "bias cu_seqlens_q cu_seqlens_k max_seqlen_q return_dbias return_dmod"
        " return_dsink sink",
    ),
    "launch/directions": (
        "pointers of its own", "cu_seqlens_q mod_arrays seed",
    ),
    "launch/kvcache": ("packed queries", "cu_seqlens_q"),
    "launch/parts": ("a seed that changes", "seed"),
    "launch/recipe": (
        "what changes from call to call", "dropout mod_arrays seed",
    ),
    "launch/run": ("a seed that changes", "seed"),
    "launch/structs": ("its terms", "softcap"),
    "backends/numpy": (
        "the equations",
        "alibi_slopes bias cu_seqlens cu_seqlens_q cu_seqlens_k dropout mask"
        " mask_mod max_seqlen_q max_seqlen_k mod_arrays return_dmod score_mod"
        " seed segment_ids_q segment_ids_k sink softcap window",
    ),
    # The check that users run.
    "check/options": (
        "a value of each, what they add to bounds",
        "alibi_slopes bias cu_seqlens cu_seqlens_k cu_seqlens_q dropout mask"
        " mask_mod mod_arrays return_dmod score_mod seed segment_ids_k"
        " segment_ids_q sink softcap window",
    ),
    "check/exact": ("the other term of a row", "sink"),
    "check/expected": ("the bound of its gradient", "sink"),
    # Bridges: what others call ours, what a library asks of one option.
    "torch/attention": ("seeds drawn, warnings", "bias dropout seed"),
    "torch/derivatives": ("linear in it", "dropout"),
    "torch/block_mask": ("theirs", "mask_mod"),
    "torch/block_slices": ("theirs", "mask_mod"),
    "torch/listed_blocks": ("theirs", "mask_mod"),
    "torch/flex": ("theirs", "mask_mod score_mod"),
    "torch/pair_bias": ("theirs", "bias mask mod_arrays score_mod"),
    "jax/pair_bias": ("theirs", "bias mask"),
    "torch/compiled_functions": (
        "finds the two roles", "mask_mod mod_arrays score_mod",
    ),
    "torch/functions": (
        "finds the two roles", "mask_mod mod_arrays score_mod",
    ),
    "torch/recording": ("the two roles", "mask_mod score_mod"),
    "torch/kvcache": ("packs queries alone", "cu_seqlens_q"),
    "torch/kvcache_ops": ("the schema", "cu_seqlens_q window"),
    "torch/masks": ("of models", "window"),
    "torch/ops": ("the schema", "dropout seed window"),
    "torch/readouts": (
        "the schema, no gradient, before dropout", "bias dropout seed window",
    ),
    "torch/returned_weights": ("no gradient by weights", "bias"),
    "torch/request": (
        "offsets are checked, numbers of functions",
        "cu_seqlens_q mod_arrays seed",
    ),
    "torch/sdpa": ("theirs", "bias dropout mask window"),
    "torch/transformers": (
        "theirs",
        "bias dropout mask segment_ids_q segment_ids_k sink softcap window",
    ),
    "torch/transforms": ("axes", "bias cu_seqlens_q mask segment_ids"),
    "torch/types": (
        "type checkers read text", "cu_seqlens_q cu_seqlens_k softcap window",
    ),
    "torch/vmap": ("axes", "bias"),
    "jax": ("a seed may be an array", "seed"),
    "jax/attention": ("values on the host", "cu_seqlens_q seed window"),
    "jax/arguments": (
        "axes",
        "bias cu_seqlens_q cu_seqlens_k mask max_seqlen_q max_seqlen_k"
        " segment_ids",
    ),
    "jax/readouts": (
        "as jax/attention, before dropout", "cu_seqlens_q dropout seed window",
    ),
    "jax/blocks": (
        "the equations, of derivatives without kernels",
        "alibi_slopes bias cu_seqlens_k cu_seqlens_q dropout mask mask_mod"
        " mod_arrays score_mod seed"
        " segment_ids_k segment_ids_q sink softcap window",
    ),
    "jax/batching": ("by position in the batch", "cu_seqlens_q dropout"),
    "jax/functions": (
        "from functions to graphs", "mask_mod mod_arrays score_mod",
    ),
    "jax/jaxprs": ("the role that has a score", "score_mod"),
    "jax/kvcache": ("packs queries alone", "cu_seqlens_q max_seqlen_q window"),
    "jax/cuda": ("is converted", "alibi_slopes seed"),
    "flash_attn/arguments": (
        "theirs", "alibi_slopes bias dropout mask window"
    ),
    "flash_attn/dense": ("theirs", "alibi_slopes dropout softcap"),
    "flash_attn/kvcache": (
        "theirs", "alibi_slopes cu_seqlens_q max_seqlen_q softcap"
    ),
    "flash_attn/layers": ("theirs", "cu_seqlens"),
    "flash_attn/rotation": ("theirs", "cu_seqlens"),
    "flash_attn/varlen": (
        "theirs",
        "alibi_slopes cu_seqlens cu_seqlens_q cu_seqlens_k dropout"
        " max_seqlen_q max_seqlen_k softcap",
    ),
    "distributed": (
        "blocks of a mask",
        "cu_seqlens cu_seqlens_q cu_seqlens_k mask seed window",
    ),
    "distributed/functions": (
        "the two roles", "mask mask_mod mod_arrays return_dmod score_mod",
    ),
    "distributed/attention": (
        "arguments of its own",
        "cu_seqlens_q cu_seqlens_k mask softcap window",
    ),
    # Other meanings of a word.
    "__init__": ("builders", "cu_seqlens segment_ids"),
    "api/builders": ("builders", "cu_seqlens segment_ids mask"),
    "backends/emulator": ("of schedules, of addresses", "seed mask"),
}  # fmt: skip


MODULES = {
    file.relative_to(PACKAGE).with_suffix("").as_posix(): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def place_of(module):
    """Return the entry of a module, "" without one."""
    found = (x for x in PLACES if module.startswith(x))
    return max(found, key=len, default="")


def named_in(place):
    """Return the options that the modules of a place name."""
    texts = [f.read_text() for x, f in MODULES.items() if place_of(x) == place]
    return NAMES & set().union(*map(words_of, texts))


def test_each_place_names_the_options_listed():
    """No others, and each of them; "" is all that is outside the places."""
    for place in ["", *PLACES]:
        _, *some = PLACES.get(place, ("", ""))
        found = named_in(place)
        assert found == set(some[0].split() if some else found), place
        assert found or not place, place
