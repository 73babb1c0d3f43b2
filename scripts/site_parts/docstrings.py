"""Makes links of what docstrings name: papers, notes and pages."""

from __future__ import annotations

import re

from cuflash import reference

# Papers are named by arXiv:... and doi:...
_PAPERS = (
    (re.compile(r"arXiv:(\d{4}\.\d{5})"), "https://arxiv.org/abs/"),
    (re.compile(r"doi:(10\.[\w./]*\w)"), "https://doi.org/"),
)
_PAGE = re.compile(r"``docs/(\w+/\w+)\.md``")
# The sources that the reference's own docstring lists and others name: [FA].
_TAGS = re.findall(r"^- \[(\w+)\]", reference.__doc__ or "", re.MULTILINE)
_SOURCE = re.compile(rf"(?<![\w\]`])\[({'|'.join(_TAGS)})\](?!\[)")


def linked(line: str, name: str) -> str:
    """Return a line of the docstring of a thing, with links.

    >>> linked("by [FA]", "cuflash.reference.forward")
    'by :doc:`[FA] <sources>`'
    """
    if line.lstrip().startswith((">>>", "...")):
        return line
    for pattern, site in _PAPERS:
        line = pattern.sub(rf"`\g<0> <{site}\g<1>>`__", line)
    if name.startswith("cuflash.reference."):
        line = _SOURCE.sub(r":doc:`[\1] <sources>`", line)
    return _PAGE.sub(r":doc:`/\1`", line)
