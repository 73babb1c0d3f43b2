"""Makes links of what docstrings name, and sets formulas' names upright."""

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

# In a formula: a command of TeX, and its argument where that is text; or
# letters, which are a name if they are three or more.
_LETTERS = re.compile(
    r"\\(?:mathrm|text|operatorname|begin|end)\s*\{[^}]*\}|\\[a-zA-Z]+"
    r"|(?P<gradient>d{0,2})(?P<name>[a-z]{3,}(?:\\_[a-z]+)*)(?![a-zA-Z])"
    r"|[a-zA-Z]+"
)
_ROLE = re.compile(r":math:`([^`]*)`")


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


def upright(lines: list[str]) -> list[str]:
    r"""Return the lines of a docstring, with names in formulas upright.

    TeX would set lse as the product of l, s and e.

    >>> print(upright([r"Return :math:`D_i - dlse_i`."])[0])
    Return :math:`D_i - d\mathrm{lse}_i`.
    """
    result, indent = [], None
    for line in lines:
        start = len(line) - len(line.lstrip())
        if indent is not None and line.strip() and start <= indent:
            indent = None
        if line.lstrip().startswith(".. math::"):
            indent = start
            line = line.replace(".. math::", "\0")
            line = _upright_names(line).replace("\0", ".. math::")
        elif indent is not None:
            line = _upright_names(line)
        else:
            line = _ROLE.sub(lambda x: f":math:`{_upright_names(x[1])}`", line)
        result.append(line)
    return result


def _upright_names(formula: str) -> str:
    def set_upright(letters: re.Match[str]) -> str:
        if not letters["name"]:
            return letters[0]
        return f"{letters['gradient']}\\mathrm{{{letters['name']}}}"

    return _LETTERS.sub(set_upright, formula)
