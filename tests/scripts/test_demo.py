"""scripts/demo.py: gradients, text, comparison, pictures."""

import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("rich", reason="the demo needs the extra `scripts`")
pytest.importorskip("matplotlib", reason="the demo needs the extra `scripts`")

import demo
from demo_parts.comparison import (
    Materialised,
    compare,
    costs,
    random_inputs,
)
from demo_parts.entropy import head_entropies, largest_entropy
from demo_parts.lists import Lists, share_in_order
from demo_parts.model import Config, Transformer
from demo_parts.text import Corpus, load_text
from demo_parts.training import Adam
from device_memory import peak_bytes
from helpers.compare import assert_allclose, assert_arrays_equal

TINY = Config(
    num_layers=2,
    num_heads=2,
    head_dim=4,
    seqlen=6,
    batch=2,
    dtype=np.float64,
    attention_dtype=np.float64,
)


def tiny_model(seed=0):
    """Return a float64 model without zero gradients, and a batch."""
    model = Transformer(TINY, 5, np)
    rng = np.random.default_rng(seed)
    model.values[:] += 0.3 * rng.standard_normal(len(model.values))
    tokens, targets = rng.integers(5, size=(2, TINY.batch, TINY.seqlen))
    return model, tokens, targets


@pytest.mark.parametrize("name", Transformer(TINY, 5, np).p)
def test_gradient_is_that_of_finite_differences(name):
    model, tokens, targets = tiny_model()
    loss = model.loss(tokens, targets, with_gradient=True)
    value, start = model.p[name], model.p[name].copy()
    direction = np.random.default_rng(1).standard_normal(value.shape)

    def slope(step):
        value[:] = start + step * direction
        above = model.loss(tokens, targets)
        value[:] = start - step * direction
        return (above - model.loss(tokens, targets)) / (2 * step)

    # A central difference errs by c step^2, so the one of twice the step by
    # 4 c step^2: a third of what lies between them, and as much again for
    # the next order. Rounding of the losses, of about 100 additions each,
    # is divided by the step.
    step = 1e-4
    near, far = slope(step), slope(2 * step)
    truncation = 2 * abs(far - near) / 3
    rounding = 100 * np.finfo(np.float64).eps * loss / step
    got = np.sum(model.g[name] * direction)
    assert got != 0
    assert abs(got - near) <= truncation + rounding


def test_adam_steps_by_the_rate_at_first():
    model, tokens, targets = tiny_model()
    model.loss(tokens, targets, with_gradient=True)
    before = model.values.copy()
    Adam(model, tiny=1e-8).step(0.01)
    size = abs(model.gradient)
    # Values are below 4: half an ulp of 4, and as much for `before` minus
    # them, is 9e-16; steps of 0.01 are rounded far below that.
    assert_allclose(
        before - model.values,
        0.01 * np.sign(model.gradient) * size / (size + 1e-8),
        "before - model.values",
        atol=2e-15,
    )


def test_first_loss_is_a_uniform_guess():
    model = Transformer(TINY, 5, np)
    tokens = np.zeros((2, 6), dtype=int)
    # Logits are exactly 0, so only log and the mean of 12 are rounded.
    assert model.loss(tokens, tokens) == pytest.approx(np.log(5), rel=1e-14)


def test_tokens_that_are_not_asked_for_count_nothing():
    model, tokens, targets = tiny_model()
    whole = model.loss(tokens, targets, with_gradient=True)
    gradient = model.gradient.copy()
    more = np.concatenate([targets, np.full_like(targets, -1)])
    loss = model.loss(np.tile(tokens, (2, 1)), more, with_gradient=True)
    # Sums of at most a few hundred terms, each rounded.
    assert loss == pytest.approx(whole, rel=1e-13)
    error = np.abs(model.gradient - gradient).max()
    assert error <= 1e-13 * np.abs(gradient).max()


def test_lists_are_followed_by_themselves_in_order():
    lists = Lists(["b", "a", "d", "c"])
    tokens, targets = lists.batch(lists.train, TINY, np.random.default_rng(0))
    assert tokens.shape == targets.shape == (TINY.batch, 6)
    for row, after in zip(tokens, targets, strict=True):
        words = sorted(lists.decode(row[:3]).split())
        assert len(set(words)) == 3
        assert lists.decode(row[3:]).split() == [":", *words[:2]]
        assert lists.decode(after[3:]).split() == words
        assert after[:3].tolist() == [-1] * 3


def test_only_lists_without_a_fault_are_counted():
    lists = Lists(["a", "b", "c"])  # a list of all: always a, b, c
    model = Transformer(TINY, 4, np)
    rng = np.random.default_rng(0)
    model.p["norm"][:] = 0  # logits are 0, and the likeliest word a
    assert share_in_order(model, lists, rng) == 0
    model.forward = lambda tokens: (np.eye(4)[[[0, 0, 0, 0, 1, 2]]], None)
    assert share_in_order(model, lists, rng) == 1


def test_text_is_encoded_and_split_without_loss():
    text = load_text()
    corpus = Corpus(text)
    both = corpus.decode(corpus.train), corpus.decode(corpus.validation)
    paragraphs = [part.split("\n\n") for part in both]
    assert sorted(sum(paragraphs, [])) == sorted(text.split("\n\n"))


def test_targets_are_the_next_characters():
    corpus = Corpus(load_text())
    rng = np.random.default_rng(0)
    tokens, targets = corpus.batch(corpus.train, TINY, rng)
    assert tokens.shape == targets.shape == (TINY.batch, TINY.seqlen)
    assert_arrays_equal(tokens[:, 1:], targets[:, :-1], "tokens[:, 1:]")


def test_python_without_the_text_gets_a_clear_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(SystemExit, match="pydoc_data.topics"):
        load_text()


def test_comparison_is_within_its_bound():
    config = replace(TINY, attention_dtype=np.float32)
    inputs = random_inputs(40, config, np, seed=0)
    found = list(compare(*inputs, np))
    assert [row[0] for row in found] == ["out", "dq", "dk", "dv"]
    assert all(error <= bound for *_, error, bound in found)


def test_comparison_sees_a_wrong_result(monkeypatch):
    from demo_parts import comparison

    def wrong(*inputs):
        return [
            1.001 * x for x in comparison.materialised(*inputs, np.float32, np)
        ]

    monkeypatch.setattr(comparison, "tiled", wrong)
    config = replace(TINY, attention_dtype=np.float32)
    inputs = random_inputs(40, config, np, seed=0)
    found = comparison.compare(*inputs, np)
    assert all(error > bound for *_, error, bound in found)


def test_long_contexts_need_less_memory_than_the_matrix():
    config = replace(TINY, attention_dtype=np.float32)
    (_, ours), (_, theirs) = costs(random_inputs(1024, config, np, 0), np)
    assert theirs > 1024 * 1024 * 4 * config.num_heads > ours


def test_entropies_are_means_of_p_log_p():
    model, tokens, _ = tiny_model()
    _, saved = model.forward(tokens)
    layers = [saved[f"{i}.attention"] for i in range(TINY.num_layers)]
    for got, (_, q, k, _, _, lse) in zip(
        head_entropies(layers), layers, strict=True
    ):
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * TINY.head_dim**-0.5
        p = np.exp(scores - lse[..., None]) * np.tri(TINY.seqlen)
        terms = p * np.log(p, out=np.zeros_like(p), where=p > 0)
        # Scores are below 16, half an ulp of which is 8.9e-16. Both sides
        # round one 6 times: four products, scale, lse. The slope of an
        # entropy in log P is the sum of P |1 + log P|, below 1 + log 6.
        atol = 2 * 6 * 8.9e-16 * (1 + np.log(6))
        wanted = -terms.sum(axis=-1).mean(axis=(0, 2))
        assert_allclose(got, wanted, "entropies", atol=atol)


def test_equal_weights_have_the_largest_entropy():
    q = np.zeros((2, 6, 3, 4))
    lse = np.broadcast_to(np.log(np.arange(1, 7)), (2, 3, 6))
    got = head_entropies([(None, q, q, q, q, lse)])
    assert got.shape == (1, 3)
    # exp(-log 6) errs by 3 halves of eps, relatively, and its product with lse
    # by one; 6 of them are added, and means are of 12 and of 6.
    rtol = (3 + 1 + 5 + 12 + 6) * 1.2e-16
    assert_allclose(got, largest_entropy(6), "entropies", rtol=rtol)


def test_a_short_run_learns_and_saves_pictures(tmp_path, monkeypatch, capsys):
    small = Config(
        num_layers=1,
        num_heads=2,
        head_dim=16,
        seqlen=48,
        batch=4,
        steps=30,
        long_seqlens=(64, 128),
    )
    monkeypatch.setattr(demo, "choose_device", lambda: (np, small, "a test"))
    assert demo.main(["--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    first, last = shown.split("fell from ")[1].split(" nats")[0].split(" to ")
    # That words come in order is soon learned.
    assert float(last) < float(first) - 0.7
    table = shown.split("largest possible")[1].split("Pictures")[0].split()
    *heads, largest = map(float, table[2:])  # after "layer 1"
    assert len(heads) == small.num_heads
    assert all(0 < x < largest for x in heads)
    assert largest == round(largest_entropy(small.seqlen), 2)
    assert "of the 24 words. Of 256 new lists" in shown
    for name in ("loss.png", "attention.png", "memory.png"):
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert name in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: 0 is less than 1"),
        (["--seconds", "0"], "argument --seconds: 0: must be above 0"),
        (["--seconds", "nan"], "nan: must be above 0"),
        (["--seed", "-1"], "--seed -1: at least 0"),
        (["--output", __file__], "cannot write to"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_in_a_line(monkeypatch, tmp_path, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert demo.main(["--output", str(tmp_path / "new")]) == 130
    assert capsys.readouterr().err == "stopped: no picture was saved\n"
    assert not (tmp_path / "new").exists()


def test_plain_attention_has_the_same_gradient():
    model, *batch = tiny_model()
    loss = model.loss(*batch, with_gradient=True)
    gradient = model.gradient.copy()
    plain = Materialised(np.float64, np)
    model.config = replace(TINY, attention=plain)
    # Sums of at most a few hundred terms, each rounded.
    assert model.loss(*batch, with_gradient=True) == pytest.approx(loss, 1e-13)
    largest = np.abs(gradient).max()
    assert np.abs(model.gradient - gradient).max() <= 1e-13 * largest


@pytest.mark.gpu
def test_memory_of_a_call_on_a_gpu(cp):
    kept = [cp.ones(1 << 20, np.uint8) for _ in range(8)]
    del kept[::2]  # room in the default pool
    assert peak_bytes(lambda: cp.empty(1 << 20, np.uint8)) == 1 << 20
