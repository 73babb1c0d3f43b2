"""TypedDicts as type checkers see them: by their text."""

import ast
import re
from pathlib import Path


def fields_of(name, *files):
    """Return the fields of a TypedDict of some files, inherited ones too.

    Type variables are replaced by what they stand for.
    """
    text = "\n".join(Path(file).read_text() for file in files)
    nodes = ast.walk(ast.parse(text))
    classes = {x.name: x for x in nodes if isinstance(x, ast.ClassDef)}
    return _fields(classes, name, ())


def _fields(classes, name, given):
    found, variables = {}, {}
    for kind, arguments in map(_parts, classes[name].bases):
        if kind == "Generic":
            variables = dict(zip(arguments, given, strict=False))
        elif kind in classes:
            found |= _fields(classes, kind, arguments)
    found |= {
        x.target.id: ast.unparse(x.annotation)
        for x in classes[name].body
        if isinstance(x, ast.AnnAssign)
    }
    return {
        field: re.sub(
            r"\b[A-Z]\b", lambda x: variables.get(x[0], x[0]), annotation
        )
        for field, annotation in found.items()
    }


def _parts(base):
    """The name and the arguments of a base class."""
    if not isinstance(base, ast.Subscript):
        return ast.unparse(base), []
    items = getattr(base.slice, "elts", [base.slice])
    return base.value.id, [ast.unparse(x) for x in items]
