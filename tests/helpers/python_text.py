"""What the text of a Python module names."""

import ast


def words_of(text):
    """Return a module's identifiers, keywords and whole strings."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "attr", "arg", "value", "name"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                found.add(word)
    return found
