"""scripts/generate.py: text with and without a KV cache, and by drafts."""

import functools

import numpy as np
import pytest

pytest.importorskip("rich", reason="generating needs the extra `scripts`")

import generate
from demo_parts import drafts
from demo_parts.generation import Cache, greedy, sampler
from demo_parts.generation import generate as write_tokens
from demo_parts.model import Config, Transformer

SMALL = Config(
    num_layers=2, num_heads=2, head_dim=8, seqlen=48, batch=4, steps=10
)


@pytest.fixture
def small(monkeypatch):
    """A small model, and n-grams of two characters: 1/8 of the table."""
    monkeypatch.setattr(
        generate, "choose_device", lambda: (np, SMALL, "a test")
    )
    pairs = functools.partial(drafts.Ngrams, order=2)
    monkeypatch.setattr(drafts, "Ngrams", pairs)


def test_a_short_run_writes_the_same_text_thrice(small, capsys):
    assert generate.main(["--tokens", "70"]) == 0
    shown = capsys.readouterr().out
    assert "pieces of 74 characters" in shown
    assert "All wrote the same text" in shown
    rows = [x.split() for x in shown.splitlines() if "cache  " in x]
    assert [x[-3] for x in rows] == ["70", "70"]
    (drafted,) = (x.split() for x in shown.splitlines() if "drafts  " in x)
    assert 1 <= int(drafted[-3]) <= 71
    assert all(float(x[-1].replace(",", "")) > 0 for x in (*rows, drafted))


def test_texts_that_differ_are_an_error(small, monkeypatch, capsys):
    def wrong(self, *given):
        return right(self, *given) + (self.seqlen > 20)

    right = Cache.attend
    monkeypatch.setattr(Cache, "attend", wrong)
    assert generate.main(["--tokens", "45"]) == 1
    assert "The texts differ from character" in capsys.readouterr().out


def test_agreement_counts_the_first_equal_characters():
    logits = np.zeros((4, 2))
    others = logits + [[0.0], [1.0], [2.0], [9.0]]
    found = generate.agreement(
        ([1, 2, 3, 4], logits, 0), ([1, 2, 0, 4], others, 0)
    )
    # The third was chosen after the same text, the fourth was not.
    assert found == (2, 2.0)
    found = generate.agreement(
        ([1, 2, 3, 4], logits, 0), ([1, 2, 3, 4], others, 0)
    )
    assert found == (4, 9.0)


def random_model(seqlen):
    model = Transformer(generate.sizes(SMALL, seqlen, 1), 5, np)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(len(model.values)).astype(np.float32)
    model.values += 0.3 * noise
    return model


each_prompt = pytest.mark.parametrize("prompt", [[2], [0, 1, 2, 3, 4]])
each_choice = pytest.mark.parametrize(
    "choose", [lambda: greedy, lambda: sampler(3)]
)


@each_choice
@each_prompt
def test_each_token_is_that_without_a_cache(choose, prompt):
    """Here without a cache each token costs a pass: all are compared."""
    model = random_model(45)
    cached, _ = write_tokens(model, prompt, 40, choose(), Cache(model, 45))
    whole, _ = write_tokens(model, prompt, 40, choose())
    assert cached == whole
    assert len(set(cached)) > 2


@each_choice
@each_prompt
def test_each_token_is_that_without_drafts(choose, prompt):
    """Drafts from the text itself: most are right, few of a random text's."""
    model = random_model(45)
    alone, _ = write_tokens(model, prompt, 40, choose(), Cache(model, 45))
    for text, (least, most) in (
        (prompt + alone, (5, 30)),
        ([0, 1] * 9, (30, 41)),
    ):
        drafted, _, passes = drafts.generate(
            model, prompt, 40, choose(), Cache(model, 53),
            drafts.Ngrams(text, order=3), 8,
        )  # fmt: skip
        assert drafted == alone
        assert least <= passes <= most


def test_a_tree_has_the_likeliest_drafts():
    # After 0: 1 (3 of 4) or 2; after 0, 1: always 3; after 0, 2: always 4.
    ngrams = drafts.Ngrams([0, 1, 3, 0, 1, 3, 0, 1, 3, 0, 2, 4], order=2)
    tree = drafts.grow(ngrams, [4, 0], 5, 2)
    assert tree.tokens == [0, 1, 3, 2, 4]
    assert tree.parents == [-1, 0, 1, 0, 3]
    assert tree.depths == [0, 1, 2, 1, 2]
    assert tree.child(0, 2) == 3
    assert tree.child(0, 3) is None
    above = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4]]
    assert [np.flatnonzero(x).tolist() for x in tree.is_ancestor()] == above


def test_batches_keep_their_size():
    assert generate.sizes(SMALL, 96, 7).batch == 2
    assert generate.sizes(SMALL, 4096, 7).batch == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "argument --tokens: 0 is less than 1"),
        (["--tokens", "8193"], "--tokens 8193: at most 8,192"),
        (["--seconds", "0"], "argument --seconds: 0: must be above 0"),
        (["--seed", "-1"], "--seed -1: at least 0"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        generate.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_in_a_line(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "train", interrupted)
    assert generate.main(["--quick"]) == 130
    assert capsys.readouterr().err == "stopped: nothing was saved\n"


@pytest.mark.gpu
def test_a_run_on_a_gpu(capsys):
    assert generate.main(["--quick", "--tokens", "40"]) == 0
    shown = capsys.readouterr().out
    assert "by CuPy" in shown
    assert "All wrote the same text" in shown
