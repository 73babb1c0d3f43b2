"""scripts/build_docs.py: what it makes of the repository's pages."""

import sys
import types
from pathlib import Path

import pytest

import build_docs
from site_parts import docstrings, sources, stubs

ROOT = Path(__file__).parents[2]
TARGETS = sources.link_targets(ROOT, sources.site_names(ROOT))


@pytest.mark.parametrize(
    "source, page, link, made",
    [
        ("docs/guide/options.md", "guide/options.md",
         "[a](../../README.md#options)", "[a](../overview.md#options)"),
        ("README.md", "overview.md",
         "[a](docs/guide/kvcache.md)", "[a](guide/kvcache.md)"),
        ("README.md", "overview.md", "[`a`](reference)",
         "[`a`](algorithm/index.md)"),
        ("docs/algorithm/README.md", "algorithm/index.md",
         "[a](../../reference/softmax.py)", "[a](softmax.rst)"),
        ("CONTRIBUTING.md", "contributing.md",
         "[`slow.txt`](tests/slow.txt)", "`slow.txt`"),
        ("docs/index.md", "index.md", "[a](lab/README.md)",
         "[a](lab/index.md)"),
        ("README.md", "overview.md", "![a\nb](docs/benchmarks/h200_mma.json)",
         "![a\nb](benchmarks/h200_mma.json)"),
        ("README.md", "overview.md", "[a](#options)", "[a](#options)"),
        ("README.md", "overview.md", "[a](https://x.y/z)",
         "[a](https://x.y/z)"),
    ],
)  # fmt: skip
def test_links_lead_to_the_sites_pages(source, page, link, made):
    assert sources.with_links(link, source, page, TARGETS) == made


@pytest.mark.parametrize(
    "link, made",
    [
        ("[guide/a.md](a.md#x)", "[guide/a.md](a.md#x)"),
        ("[a.md](a.md#x)", "[A](a.md#x)"),
        ("[docs/guide/a.md](../../docs/guide/a.md)",
         "[A](../../docs/guide/a.md)"),
        ("[how](a.md)", "[how](a.md)"),
        ("[gone.md](gone.md)", "[gone.md](gone.md)"),
    ],
)  # fmt: skip
def test_a_link_named_by_a_path_gets_the_pages_title(repository, link, made):
    page = repository / "docs/guide/README.md"
    assert sources.with_titles(link, page) == made


def test_a_folders_pages_are_in_its_order():
    text = "[b](b.md) and [x](../x/c.md), [again](b.md#at)"
    pages = ["f/index.md", "f/a.md", "f/b.md", "f/picture.png", "g/c.md"]
    made = sources.toctree(text, "f/index.md", pages)
    assert made.split("\n\n")[1].split() == ["b", "a", "```"]


def test_a_page_alone_has_no_toctree():
    assert sources.toctree("", "f/index.md", ["f/index.md"]) == ""


@pytest.fixture
def repository(tmp_path):
    """A small repository."""
    pages = {
        "README.md": "# small\n[guide](docs/guide/README.md)\n",
        "CONTRIBUTING.md": "# C\n",
        "CHANGELOG.md": "# C\n",
        "docs/index.md": "# small\n",
        "docs/guide/README.md": "# Guide\n",
        "docs/guide/a.md": "# A\n",
        "docs/gallery/plot_1.py": "",
    }
    for name, text in pages.items():
        sources.write(tmp_path / "root" / name, text)
    return tmp_path / "root"


def test_pages_are_copied(repository, tmp_path):
    site = tmp_path / "site"
    sources.copy(repository, site)
    overview = (site / "overview.md").read_text()
    assert overview == "# Overview\n[guide](guide/index.md)\n"
    assert "\na\n" in (site / "guide/index.md").read_text()


def test_what_is_unchanged_keeps_its_time(repository, tmp_path):
    site = tmp_path / "site"
    sources.copy(repository, site)
    before = {x: x.stat().st_mtime_ns for x in site.rglob("*.*")}
    sources.write(repository / "docs/guide/a.md", "# Another\n")
    sources.copy(repository, site)
    changed = {x for x in before if x.stat().st_mtime_ns != before[x]}
    assert changed == {site / "guide/a.md"}


@pytest.mark.parametrize("gone", ["docs/guide/a.md", "docs/gallery/plot_1.py"])
def test_a_page_that_is_gone_leaves_nothing(repository, tmp_path, gone):
    site = tmp_path / "site"
    sources.copy(repository, site)
    sources.write(site / "examples/made.rst", "of an earlier build")
    (repository / gone).unlink()
    sources.copy(repository, site)
    assert not (site / gone.removeprefix("docs/")).exists()
    assert not (site / "examples").exists()
    assert (site / "guide/index.md").exists()


def test_each_module_of_the_reference_has_a_page(tmp_path):
    stubs.write_reference(tmp_path)
    made = {path.stem for path in (tmp_path / "algorithm").iterdir()}
    modules = {path.stem for path in (ROOT / "reference").glob("*.py")}
    assert made == modules - {"__init__"} | {"sources"}


def test_pictures_of_modules_come_from_the_gallery():
    for page, _ in stubs.PICTURES.values():
        assert (ROOT / "docs/gallery" / f"{page}.py").exists()


def test_a_bridge_without_its_library_says_what_to_install():
    page = stubs._missing("PyTorch", "torch")
    assert "cuflash[torch]" in page and "autosummary" not in page


def test_a_build_in_ci_needs_every_bridge(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(build_docs, "ROOT", tmp_path)
    monkeypatch.setattr(build_docs.sources, "copy", lambda *_: None)
    monkeypatch.setattr(build_docs.stubs, "write_all", lambda _: ["torch"])
    assert build_docs.build(tmp_path / "site") == 1
    assert "cuflash[torch] is not installed" in capsys.readouterr().out


def test_a_missing_bridge_is_reported(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cuflash.torch", None)
    assert "torch" in stubs.write_bridges(tmp_path)
    assert "automodule" not in (tmp_path / "api/torch.rst").read_text()


@pytest.mark.parametrize(
    "formula, made",
    [
        (r"D_i - dlse_i", r"D_i - d\mathrm{lse}_i"),
        (r"e^{S - lse}", r"e^{S - \mathrm{lse}}"),
        (r"ddK \circ dS", r"ddK \circ dS"),
        (r"rotary\_dim", r"\mathrm{rotary\_dim}"),
        (r"\mathrm{rowsum}(P)", r"\mathrm{rowsum}(P)"),
    ],
)
def test_names_in_formulas_are_upright(formula, made):
    inline = [f"Of dlse: :math:`{formula}`."]
    block = [".. math::", f"    {formula}", "of scale and lse"]
    assert docstrings.upright(inline) == [f"Of dlse: :math:`{made}`."]
    assert docstrings.upright(block) == [block[0], f"    {made}", block[2]]


def test_the_page_of_a_bridge_lists_functions_only(monkeypatch):
    bridge = types.SimpleNamespace(__all__=["__version__", "function"])
    monkeypatch.setitem(sys.modules, "cuflash.a_bridge", bridge)
    page = stubs._bridge("cuflash.a_bridge", "A")
    assert page.split("generated")[1].split() == ["function"]


def test_pages_of_names_that_are_gone_are_removed(tmp_path):
    for name in ("a.old", "a.new", "b.old"):
        sources.write(tmp_path / f"cuflash.{name}.rst", "")
    stubs.remove_unlisted(tmp_path, "cuflash.a", "   new\n")
    left = {page.name for page in tmp_path.iterdir()}
    assert left == {"cuflash.a.new.rst", "cuflash.b.old.rst"}


@pytest.mark.parametrize(
    "name, line, made",
    [
        ("reference.forward", "([003], eq. 1)",
         "(:doc:`[003] <sources>`, eq. 1)"),
        ("reference.forward", ">>> a[FA]", ">>> a[FA]"),
        ("reference", "- [FA] Dao", "- [FA] Dao"),
        ("api", "[FA], ``docs/guide/jax.md``", "[FA], :doc:`/guide/jax`"),
        ("reference", "arXiv:2205.14135,",
         "`arXiv:2205.14135 <https://arxiv.org/abs/2205.14135>`__,"),
    ],
)  # fmt: skip
def test_links_in_docstrings(name, line, made):
    assert docstrings.linked(line, f"cuflash.{name}") == made


def test_a_file_is_no_folder_for_the_output(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as stopped:
        build_docs.main(["--output", str(file)])
    assert stopped.value.code == 2
    assert "Not a directory" in capsys.readouterr().err
