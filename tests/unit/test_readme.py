"""The examples of README and guide run, and what these name exists."""

import inspect
import re
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path

import pytest

import cuflash
from cuflash import __main__
from cuflash.plans import sm90
from cuflash.plans.plan import device_of_arch
from helpers.compare import assert_all
from helpers.kernels import ASKED, small_problem

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page_of_the_guide(name):
    return (ROOT / f"docs/guide/{name}.md").read_text(encoding="utf-8")


QUICK_START = page_of_the_guide("quick_start")


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def test_the_readmes_example_runs():
    (block,) = python_blocks(README)
    names = {}
    exec(block, names)
    assert names["dq"].shape == names["q"].shape


def test_the_readmes_quick_start_fits_a_screen():
    section = README.split("## Quick start\n")[1].split("\n## ")[0]
    assert len(section.strip().splitlines()) < 25


def test_examples_of_the_quick_start_run():
    blocks = python_blocks(QUICK_START)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["gradients"].dq.shape == names["q"].shape
    assert names["dmod"]["table"].shape == (8, 511)


def test_examples_of_the_kvcache_page_run():
    decoding, text, latent = python_blocks(page_of_the_guide("kvcache"))
    names = {}
    exec(decoding, names)
    assert names["out"].shape == (2, 1, 8, 64)
    assert_all(names["seqlens"], 120, "seqlens")
    exec(text, names)
    tokens = names["text"]
    # A prompt as long as the text before a token leads to that token.
    again = [names["next_token"](tokens[:n], 0) for n in range(5, 100)]
    assert tokens[5:] == again
    assert len(set(tokens)) > 5
    exec(latent, names)
    assert names["out"].shape == (2, 1, 16, 512)


def test_examples_of_the_options_page_run():
    names = {}
    for block in python_blocks(page_of_the_guide("options")):
        exec(block, names)
    assert names["offsets"].tolist() == [0, 12, 19]
    assert names["padded"].shape == names["q"].shape
    assert names["slopes"].tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


DOCS = [str(x.relative_to(ROOT)) for x in sorted(ROOT.glob("docs/**/*.md"))]
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]


def text_of(path):
    """Return a page without comments, whose links may be broken, and CUDA."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"```cuda\n.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", PAGES)
def test_links_to_files_exist(name):
    """Pictures too."""
    text = text_of(ROOT / name)
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    targets += re.findall(r'src="(?!https?:)([^"]+)"', text)
    folder = (ROOT / name).parent
    assert [t for t in targets if not (folder / t).exists()] == []


def anchors(path):
    """Return GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(path), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("name", PAGES)
def test_links_to_headings_exist(name):
    path = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text_of(path))
    broken = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in anchors(path.parent / target if target else path)
    ]
    assert broken == []


@pytest.mark.parametrize("name", [x for x in PAGES if "lab/" not in x])
def test_kernel_files_that_pages_name_exist(name):
    """The lab log and sample output may name old files."""
    kernels = ROOT / "cuflash/kernels"
    folders = "|".join(x.name for x in kernels.iterdir() if x.is_dir())
    text = re.sub(r"^ {4}.*$", "", text_of(ROOT / name), flags=re.MULTILINE)
    named = re.findall(rf"(?:{folders})/\w+\.cuh?\b", text)
    assert [x for x in named if not (kernels / x).exists()] == []


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.M))
def test_make_targets_exist(target):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_commands_are_those_of_the_package(capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["--help"])
    assert stopped.value.code == 0
    (known,) = re.findall(r"\{([\w,]+)\}", capsys.readouterr().out)[:1]
    page = page_of_the_guide("performance")
    named = re.findall(r"^python -m cuflash (\w+)", page, re.M)
    assert sorted(named) == sorted(known.split(","))


HOPPER = device_of_arch("sm_90a")


def test_the_table_of_options_matches_hopper():
    """The other families are covered by the tests of options."""
    page = page_of_the_guide("options")
    table = page.split("<!-- options:")[1].split("\n\n")[1]
    given = {name: re.sub(r"_[qk]$", "", name) for name in api_options()}
    for row in table.splitlines()[2:]:
        option = row.strip("|").split("|")[0]
        named = re.findall(r"`(\w+)`", option)
        names = {given[name] for name in named if name in given}
        assert names
        for direction in ("forward", "backward"):
            for name in names:
                problem = small_problem(direction, "float16", **ASKED[name])
                assert sm90.runs(problem, HOPPER)
                assert sm90.runs(replace(problem, deterministic=True), HOPPER)
    assert set(given) <= set(re.findall(r"\w+", table))


def api_options():
    """Return forward's options that a family may not support."""
    names = list(inspect.signature(cuflash.forward).parameters)
    others = {"seed", "max_seqlen_q", "max_seqlen_k", "mod_arrays"}
    return set(names[names.index("window") :]) - others


def test_extras_exist():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    named = re.findall(r"'(?:\.|cuflash)\[([\w,]+)\]'", README)
    assert named
    extras = set(config["options.extras_require"])
    assert {e for names in named for e in names.split(",")} <= extras


def test_public_calls_are_named():
    calls = [n for n in cuflash.__all__ if n.islower() and n[0] != "_"]
    assert calls
    assert [n for n in calls if f"cuflash.{n}(" not in QUICK_START] == []
