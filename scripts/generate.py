"""Train a language model, and let it write with a KV cache and with drafts.

Trains the transformer of scripts/demo.py to write the documentation of Python,
character by character, then lets it continue a text three times: by
cuflash.forward, where a pass sees the whole text so far; by
cuflash.forward_kvcache, where a pass sees one new character; and so with
drafts, where a pass checks a tree of eight characters that a table of n-grams
guessed. On the GPU through CuPy, or on the CPU through NumPy.

    python scripts/generate.py             # about a minute on two CPU cores
    python scripts/generate.py --quick     # seconds
    python scripts/generate.py --tokens 1000

It trains on pieces as long as the text that it is to write, because it has one
learned embedding per position. All draw characters with the same random
numbers; attention is in float32, so that rounding almost never changes which
character is drawn. The exit status is 1 if the texts differ.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

import command_line
import cuflash
from demo_parts import drafts
from demo_parts.device import choose_device
from demo_parts.generation import Cache, generate, sampler
from demo_parts.model import Transformer
from demo_parts.tables import plain_table
from demo_parts.text import Corpus, load_text
from demo_parts.training import train

PROMPT = "The "
MAX_TOKENS = 8192
NODES = 8  # of a tree of drafts


def sizes(config, seqlen, steps):
    """Return the demo's sizes for pieces of seqlen characters.

    A batch keeps about as many characters.
    """
    batch = max(1, config.batch * config.seqlen // seqlen)
    return replace(config, seqlen=seqlen, batch=batch, steps=steps)


def timed(write, *given):
    """What `write` returns, tokens and logits first, and its seconds.

    All copy each token's logits to the host, so they wait for the GPU.
    """
    start = time.perf_counter()
    found = write(*given)
    return *found, time.perf_counter() - start


def by_cache(model, prompt, count, seed):
    cache = Cache(model, model.config.seqlen)
    return generate(model, prompt, count, sampler(seed), cache)


def by_whole_text(model, prompt, count, seed):
    return generate(model, prompt, count, sampler(seed))


def by_drafts(model, prompt, count, seed, ngrams):
    cache = Cache(model, model.config.seqlen + NODES)
    draw = sampler(seed)
    return drafts.generate(model, prompt, count, draw, cache, ngrams, NODES)


def warm_up(model, prompt, ngrams):
    """Compile what all need, for short texts and for long ones."""
    config = model.config
    for seqlen in (len(prompt), config.seqlen // 2, config.seqlen):
        model.forward(model.xp.zeros((1, seqlen), np.int32))
    by_cache(model, prompt, 2, 0)
    by_drafts(model, prompt, 2, 0, ngrams)


def agreement(cached, whole):
    """Return how many first characters agree, and their logits' difference.

    The difference is the largest, of all characters that were drawn after
    the same text.
    """
    (tokens, logits, *_), (others, other_logits, *_) = cached, whole
    pairs = zip(tokens, others, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
    after = slice(same + 1)
    return same, float(abs(logits[after] - other_logits[after]).max())


def show_speed(whole, cached, drafted, console):
    """Print the table; return whether all wrote the same."""
    count = len(cached[0])
    console.print("\n[bold]Speed[/] of writing\n")
    table = plain_table("", "passes", "seconds", "characters/s")
    for name, passes, seconds in (
        ("without a cache", count, whole[-1]),
        ("with KV cache", count, cached[-1]),
        ("and drafts", drafted[2], drafted[-1]),
    ):
        table.add_row(
            name, f"{passes:,}", f"{seconds:.2f}", f"{count / seconds:,.0f}"
        )
    console.print(Padding(table, (0, 2)))
    console.print(
        f"\n  The cache is {whole[-1] / cached[-1]:.1f} times as fast;"
        f" a pass over {NODES} drafts writes {count / drafted[2]:.1f}"
        " characters."
    )
    found = [agreement(x, whole) for x in (cached, drafted)]
    same = min(x for x, _ in found)
    difference = max(x for _, x in found)
    console.print(
        (
            "  [green]All wrote the same text[/]"
            if same == count
            else f"  [red]The texts differ from character {same + 1} on[/]"
        )
        + f"; their logits differ by at most {difference:.1e}."
    )
    return same == count


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description="Train a small language model, and let it write "
        "with and without a KV cache, and with drafts."
    )
    parser.add_argument(
        "--tokens",
        type=command_line.number,
        help="characters to write (default: 500; 2,000 on a GPU; 120 with "
        "--quick)",
    )
    parser.add_argument(
        "--seconds",
        type=command_line.positive,
        default=45,
        help="end training after this time (default: %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a short run: 40 training steps, 120 characters",
    )
    parser.add_argument("--seed", type=int, default=0, help="at least 0")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: at least 0")
    if options.tokens is not None and options.tokens > MAX_TOKENS:
        parser.error(f"--tokens {options.tokens}: at most {MAX_TOKENS:,}")
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        return run(options)
    except KeyboardInterrupt:
        return command_line.stopped("nothing was saved")


def run(options):
    console = Console(highlight=False)
    xp, config, device = choose_device()
    count = options.tokens or (
        120 if options.quick else 500 if xp is np else 2000
    )
    steps = min(40, config.steps) if options.quick else config.steps
    config = sizes(config, len(PROMPT) + count, steps)
    corpus = Corpus(load_text())
    model = Transformer(config, len(corpus.vocabulary), xp, options.seed)
    console.print(
        f"[bold]cuflash {cuflash.__version__}[/] on {device}\n"
        f"  model: {config.num_layers} layers, {config.num_heads} heads of "
        f"{config.head_dim}, trained on pieces of {config.seqlen:,} "
        "characters\n"
    )
    train(
        model,
        corpus,
        seconds=options.seconds,
        seed=options.seed,
        console=console,
    )
    model.config = replace(config, attention_dtype=np.float32)

    prompt = corpus.encode(PROMPT).tolist()
    ngrams = drafts.Ngrams(corpus.train)
    warm_up(model, prompt, ngrams)
    given = model, prompt, count, options.seed
    whole = timed(by_whole_text, *given)
    cached = timed(by_cache, *given)
    drafted = timed(by_drafts, *given, ngrams)
    console.print("\n[bold]What the model writes[/]\n")
    written = Text(PROMPT, style="dim").append(
        corpus.decode(cached[0]), style="default"
    )
    console.print(Padding(written, (0, 2, 0, 4)))
    return 0 if show_speed(whole, cached, drafted, console) else 1


if __name__ == "__main__":
    raise SystemExit(main())
