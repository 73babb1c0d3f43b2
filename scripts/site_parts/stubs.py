"""Writes the pages that numpydoc fills: one for each bridge and module."""

from __future__ import annotations

import importlib
from pathlib import Path

from site_parts.sources import write

# The packages with public names of their own, and the extra of each.
BRIDGES = {
    "distributed": ("Several devices", "mpi"),
    "torch": ("PyTorch", "torch"),
    "flash_attn": ("flash-attn's calls", "torch"),
    "jax": ("JAX", "jax"),
}
# Their modules that programs import from.
MODULES = {"flash_attn": ("bert_padding", "layers.rotary")}

# The page and the picture of the gallery that draw a module of the reference.
PICTURES = {
    "softmax": ("plot_1_online_softmax", 1),
    "tile_state": ("plot_1_online_softmax", 1),
    "attention": ("plot_2_attention_maps", 1),
    "masks": ("plot_3_masks_and_biases", 1),
    "scores": ("plot_3_masks_and_biases", 2),
    "traffic": ("plot_4_tile_sizes", 2),
    "context_parallel": ("plot_5_context_parallel", 1),
}
TITLES = {
    "jvp": "JVP",
    "kvcache": "KV cache",
    "original": "Original FlashAttention",
    "running": "Running variance",
}


def write_bridges(site: Path) -> list[str]:
    """Write api/<bridge>.rst, with its public names if it can be imported.

    Returns the extras that the other pages lack.
    """
    lacking = []
    for name, (title, need) in BRIDGES.items():
        page = site / "api" / f"{name}.rst"
        module = f"cuflash.{name}"
        try:
            text = _bridge(module, f"{title}: {module}")
            for inner in MODULES.get(name, ()):
                text += "\n" + _bridge(f"{module}.{inner}", inner, "-")
        except ImportError:
            text = _missing(f"{title}: {module}", need)
            lacking.append(need)
        write(page, text)
        remove_unlisted(site / "api" / "generated", module, text)
    return list(dict.fromkeys(lacking))


def remove_unlisted(folder: Path, module: str, text: str) -> None:
    """Remove pages of names that an earlier build listed, and `text` not."""
    listed = {line.strip() for line in text.splitlines()}
    for page in folder.glob(f"{module}.*.rst"):
        if page.stem.rpartition(".")[2] not in listed:
            page.unlink()


def _missing(title: str, need: str) -> str:
    text = (
        f"Install the extra ``cuflash[{need}]`` to use it. It was not there "
        "when these pages were built."
    )
    return "\n".join([title, "=" * len(title), "", text, ""])


def _bridge(module: str, title: str, underline: str = "=") -> str:
    names = importlib.import_module(module).__all__
    lines = [title, underline * len(title), ""]
    lines += [f".. automodule:: {module}", "   :no-members:", ""]
    lines += [f".. currentmodule:: {module}", "", ".. autosummary::"]
    lines += ["   :toctree: generated", ""]
    lines += [f"   {x}" for x in names if not x.startswith("__")]
    return "\n".join([*lines, ""])


def write_reference(site: Path) -> None:
    """Write algorithm/<module>.rst for each module of the reference."""
    from cuflash import reference

    write(site / "algorithm" / "sources.rst", _module("Package and sources"))
    for name in reference.__all__:
        page = site / "algorithm" / f"{name}.rst"
        title = TITLES.get(name, name.replace("_", " ").capitalize())
        write(page, _module(title, name))


def _module(title: str, name: str = "") -> str:
    module = ".".join(["cuflash.reference", *([name] if name else [])])
    lines = [title, "=" * len(title), ""]
    if name in PICTURES:
        page, number = PICTURES[name]
        image = f"../examples/images/sphx_glr_{page}_{number:03}.png"
        lines += [f".. figure:: {image}", "   :width: 80%"]
        lines += [f"   :target: ../examples/{page}.html", ""]
        lines += [f"   From the gallery: :doc:`../examples/{page}`", ""]
    lines += [f".. automodule:: {module}"]
    if name:
        lines += ["   :members:", "   :member-order: bysource"]
    return "\n".join([*lines, ""])


def write_all(site: Path) -> list[str]:
    """Write all pages; return the extras that those of bridges lack."""
    write_reference(site)
    return write_bridges(site)
