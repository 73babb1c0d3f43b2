"""Sphinx's settings for the documentation site: see scripts/build_docs.py."""

from sphinx.util.nodes import make_refnode

import cuflash
from site_parts import docstrings

project = "cuflash"
author = copyright = "the cuflash authors"
version = release = cuflash.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
root_doc = "index"
exclude_patterns = ["gallery/*.py", "**/README.rst"]

# Links to headings by GitHub's names for them.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

# `name` in a docstring is the thing of that name, if there is one.
default_role = "py:obj"
autodoc_typehints = "none"  # numpydoc's sections say more
autosummary_generate = True
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": r"/plot_",
    "backreferences_dir": "examples/backreferences",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "capture_repr": (),
    "show_signature": False,
    "remove_config_comments": True,
    "plot_gallery": "True",
    "abort_on_example_error": True,
    "write_computation_times": False,
}


# The copy button leaves out prompts, and the results below them.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def link(app, what, name, thing, options, lines):
    """Make links of what a docstring names; set formulas' names upright."""
    lines[:] = [docstrings.linked(line, name) for line in lines]
    lines[:] = docstrings.upright(lines)


def find_in_reference(app, env, node, content):
    """Find `masks` and `options.Options` from the reference's modules."""
    if not node.get("py:module", "").startswith("cuflash.reference"):
        return None
    name = f"cuflash.reference.{node['reftarget']}"
    found = env.get_domain("py").objects.get(name)
    if found is None:
        return None
    return make_refnode(
        app.builder, node["refdoc"], found.docname, found.node_id, content
    )


def skip_fields(app, what, name, thing, skip, options):
    """Leave out NamedTuples' "alias for field number": Attributes say more."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def setup(app):
    app.connect("autodoc-process-docstring", link)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("missing-reference", find_in_reference)


# Pages without others beside them.
html_sidebars = {
    page: [] for page in ("install", "overview", "contributing", "changelog")
}
html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "cuflash"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "header_links_before_dropdown": 7,
}
