"""scripts/run_examples.py: which blocks it finds, runs and skips."""

import pytest

import run_examples
from example_parts import pages, running

PAGE = """# Title

```python
a = 1
```

<!-- needs: torch, gpu -->
```python
import torch
```

```sh
not python
```

- a list

  ```python
  assert a == 1
  ```

```python
>>> a + 1
2
```
"""


@pytest.fixture
def page(tmp_path):
    """Write a page, and return its path."""

    def write(text):
        path = tmp_path / "page.md"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def only(needs):
    return lambda name: name in needs


def test_blocks_of_a_page(page):
    found = [*pages.blocks_of(page(PAGE))]
    assert [x.line for x in found] == [4, 9, 19, 23]
    assert [x.needs for x in found] == [(), ("torch", "gpu"), (), ()]
    assert found[2].code == "assert a == 1\n"
    assert [x.is_session for x in found] == [False, False, False, True]


@pytest.mark.parametrize(
    "text, message",
    [
        ("<!-- needs: cuda -->\n```python\n```\n", "needs 'cuda'"),
        ("<!-- needs: jax -->\n\n```python\n```\n", "on the line after"),
        ("```python\na = 1\n", "has no end"),
    ],
)
def test_pages_that_cannot_be_read(page, text, message):
    with pytest.raises(ValueError, match=message):
        list(pages.blocks_of(page(text)))


def test_a_page_is_one_program(page, monkeypatch, capsys):
    monkeypatch.setattr(running, "is_there", only(()))
    assert run_examples.main([str(page(PAGE))]) == 0
    text = capsys.readouterr().out
    assert "page.md:9 (torch)" in text
    assert "3 blocks" in text and "1 were skipped; ok" in text


@pytest.mark.parametrize(
    "block, seen",
    [
        ("a = 1\n\nassert a == 2", 'page.md", line 4'),
        (">>> 1 + 1\n3", "Expected:\n    3"),
        ("import sys\nsys.exit(3)", "FAILED"),
    ],
)
def test_a_failure_is_shown_with_its_line(page, capsys, block, seen):
    path = page(f"```python\n{block}\n```\n")
    assert run_examples.main([str(path)]) == 1
    text = capsys.readouterr().out
    assert seen in text and "failed: " in text


def test_what_is_required_must_be_there(page, monkeypatch, capsys):
    monkeypatch.setattr(running, "is_there", only(("torch",)))
    with pytest.raises(SystemExit) as stopped:
        run_examples.main([str(page(PAGE)), "--require", "jax"])
    assert stopped.value.code == 2
    assert "--require jax" in capsys.readouterr().err


def test_every_module_of_the_reference_has_an_example():
    from cuflash import reference

    found = {name for name, _ in running.modules_with_doctests()}
    named = {f"cuflash.reference.{name}" for name in reference.__all__}
    assert named <= found
    assert {"cuflash", "cuflash.api.attention"} <= found


def test_modules_of_bridges_need_their_library():
    needs = dict(running.modules_with_doctests())
    assert needs["cuflash.backends.emulator"] == ("compiler",)
    assert needs["cuflash.reference.attention"] == ()


def test_pages_that_are_read():
    named = {path.name for path in run_examples.every_page()}
    assert {"README.md", "kvcache.md", "index.md", "migrating.md"} <= named
