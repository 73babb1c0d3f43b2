"""What has to be true before a tag is published: scripts/check_release.py."""

import re
import shutil
from configparser import ConfigParser
from pathlib import Path

import pytest

import check_recipe
import check_release
import cuflash

ROOT = Path(__file__).parents[2]
FILES = (
    "setup.py",
    "setup.cfg",
    "README.md",
    "CHANGELOG.md",
    "cuflash/_version.py",
    "docs/install.md",
    "recipe/recipe.yaml",
)
RECIPE = (ROOT / "recipe/recipe.yaml").read_text(encoding="utf-8")
TAG = f"v{cuflash.__version__}"


def released(folder):
    """Copy what a release needs, changed as the owner changes it."""
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("setup.cfg", "recipe/recipe.yaml"):
        edit(folder / name, "OWNER", "somebody")
    edit(folder / "CHANGELOG.md", "(unreleased)", "(2027-01-31)")
    for name in ("README.md", "docs/install.md"):
        edit(folder / name, "not on a package index", "on the index")
    return folder


def edit(path, words, others):
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(words, others), encoding="utf-8")


def test_nothing_is_lacking_after_the_steps_of_a_release(tmp_path):
    assert list(check_release.lacking(released(tmp_path), TAG)) == []


@pytest.mark.parametrize(
    ("name", "words", "others", "said"),
    [
        ("setup.cfg", "somebody", "OWNER", "has no address yet"),
        ("CHANGELOG.md", "(2027-01-31)", "(unreleased)", "has no heading"),
        (
            "README.md",
            "# cuflash",
            "not on a package\nindex",
            "README.md says",
        ),
        ("docs/install.md", "# Install", "not on a package index", "says"),
        ("recipe/recipe.yaml", 'version: "', 'version: "1', "another version"),
        ("recipe/recipe.yaml", "- somebody", "- OWNER", "or maintainer"),
        ("cuflash/_version.py", '= "', '= "1', "the tag v"),
    ],
)
def test_what_is_lacking_is_named(tmp_path, name, words, others, said):
    edit(released(tmp_path) / name, words, others)
    lacks = list(check_release.lacking(tmp_path, TAG))
    assert lacks and said in lacks[0]


def items(heading, text=RECIPE):
    """Return the list below a heading of the recipe."""
    _, _, rest = text.partition(f"\n  {heading}:\n")
    found = re.match(r"(?:    - .*\n)+", rest)
    return re.findall(r"- (.*)\n", found[0])


def test_the_recipe_requires_what_setup_cfg_does():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    options = config["options"]
    required = [x.replace(" ", "") for x in items("run")]
    assert required[0] == "python>=${{python_min}}"
    assert required[1:] == options["install_requires"].split()
    assert f'python_min: "{options["python_requires"][2:]}"' in RECIPE
    build = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{items("host")[-1].replace(" ", "")}"' in build


def test_the_recipe_bounds_the_extras_alike():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = "".join(config["options.extras_require"].values())
    for words in items("run_constraints"):
        name, bounds = words.split()
        lowest = bounds.partition(",")[0]
        name = {"pytorch": "torch", "nccl": "nccl-cu13"}.get(name, name)
        name = {"cupy": r"cupy-cuda13x\[ctk\]"}.get(name, name)
        assert re.search(rf"{name}{re.escape(lowest)}\b", extras), words


def test_the_recipe_is_built_from_the_sdist_at_hand(tmp_path):
    text = check_recipe.of_file(RECIPE, tmp_path / "x.tar.gz", "ab12")
    assert f"\n  url: {(tmp_path / 'x.tar.gz').as_uri()}\n" in text
    assert '\n  sha256: "ab12"\n' in text and "0" * 64 not in text


WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")


def test_the_workflow_runs_scripts_that_are_there():
    named = re.findall(r"python (scripts/\w+\.py)", WORKFLOW)
    assert len(named) == 4
    assert all((ROOT / name).is_file() for name in named)


def test_rights_are_given_on_a_tag_after_all_else_passed():
    before, _, publish = WORKFLOW.partition("\n  publish:\n")
    publish, _, attach = publish.partition("\n  attach:\n")
    assert ": write" not in before
    assert "id-token: write" in publish
    assert "needs: [build, use, recipe]" in publish
    assert "if: github.ref_type == 'tag'" in publish
    assert "needs: publish" in attach
    assert "checkout" not in publish + attach
