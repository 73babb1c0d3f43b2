"""Train a small language model whose attention is cuflash's.

A transformer learns to write the documentation of Python, character by
character. Its forward and backward passes are written out by hand in array
code (demo_parts/model.py), on the GPU through CuPy or on the CPU through
NumPy; attention and its gradients are calls of cuflash.

    python scripts/demo.py            # under a minute on two CPU cores
    python scripts/demo.py --quick    # under ten seconds
    python scripts/demo.py --plain    # the same training without cuflash

After training it compares cuflash on the model's own queries, keys and values
with attention that materialises the scores, shows the time and memory of
both, prints how widely each head looks, lets the model write, and saves three
pictures. With --plain, training uses materialised attention in float64, to
show that it reaches the same loss.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

import command_line
import cuflash
from demo_parts import pictures
from demo_parts.comparison import Materialised, compare, costs, random_inputs
from demo_parts.device import choose_device
from demo_parts.entropy import head_entropies, largest_entropy
from demo_parts.generation import write
from demo_parts.model import Transformer
from demo_parts.tables import plain_table
from demo_parts.text import Corpus, load_text
from demo_parts.training import train

PROMPT = "The "


def layers_of(model, corpus, rng):
    """Return (x, q, k, v, out, lse) of each layer, on unseen text."""
    tokens, _ = corpus.batch(corpus.validation, model.config, rng)
    _, saved = model.forward(model.xp.asarray(tokens))
    return [saved[f"{i}.attention"] for i in range(model.config.num_layers)]


def inputs_of(layer, xp, rng):
    """Return dout (random) and q, k, v of a layer."""
    _, q, k, v, _, _ = layer
    dout = xp.asarray(rng.standard_normal(v.shape, dtype=np.float32))
    return dout.astype(v.dtype, copy=False), q, k, v


def show_start(model, corpus, device, console):
    config = model.config
    console.print(
        f"[bold]cuflash {cuflash.__version__}[/] on {device}\n"
        f"  text: {len(corpus.train) + len(corpus.validation):,} characters "
        f"of Python's documentation, {len(corpus.vocabulary)} different\n"
        f"  model: {config.num_layers} layers, {config.num_heads} heads of "
        f"{config.head_dim}, {len(model.values):,} parameters\n"
        f"  batch: {config.batch} pieces of {config.seqlen} characters\n"
    )


def show_losses(training, validation, options, config, console):
    if training[-1][0] < config.steps:
        console.print(f"  stopped by --seconds {options.seconds:g}")
    console.print(
        f"  on unseen text the loss fell from {validation[0][1]:.2f} to "
        f"{validation[-1][1]:.2f} nats a character"
    )


def show_check(dout, q, k, v, xp, console):
    """Print the comparison; True if every error is within its bound."""
    dtype = q.dtype.name
    console.print(
        f"\n[bold]Check[/] on the model's own attention {q.shape}, {dtype}\n"
        "  Largest error against materialised attention in float64. The\n"
        f"  bound is the error of materialised attention in {dtype}, times\n"
        "  2 for out and 3 for gradients, plus one rounding.\n"
    )
    table = plain_table(
        "", "largest value", "materialised", "cuflash", "bound", ""
    )
    fine = True
    for name, *numbers, error, bound in compare(dout, q, k, v, xp):
        fine &= error <= bound
        cells = [f"{x:.2e}" for x in (*numbers, error, bound)]
        mark = "[green]ok[/]" if error <= bound else "[red]too large[/]"
        table.add_row(name, *cells, mark)
    console.print(Padding(table, (0, 2)))
    return fine


def show_costs(table, config, console):
    console.print(
        "\n[bold]Cost[/] of one forward and backward pass "
        f"({config.num_heads} heads of {config.head_dim})\n"
    )
    dtype = np.dtype(config.attention_dtype).name
    view = plain_table(
        "tokens",
        f"cuflash\n{dtype}",
        "materialised\nfloat32",
        "cuflash\nmemory",
        "materialised\nmemory",
    )
    for name, (ours, theirs) in table:
        view.add_row(
            name,
            f"{ours[0] * 1e3:,.2f} ms",
            f"{theirs[0] * 1e3:,.2f} ms",
            f"{ours[1] / 2**20:,.1f} MiB",
            f"{theirs[1] / 2**20:,.1f} MiB",
        )
    console.print(Padding(view, (0, 2)))


def show_entropies(layers, config, console):
    """Print the mean entropy of each layer's heads."""
    console.print(
        "\n[bold]Entropy[/] of the heads' weights in nats, mean over queries\n"
        "  From 0, where a query looks at one key, to the logarithm of the\n"
        "  number of visible keys, where it looks at all alike.\n"
    )
    heads = [f"head {i + 1}" for i in range(config.num_heads)]
    table = plain_table("", *heads, "largest possible")
    largest = f"{largest_entropy(config.seqlen):.2f}"
    for i, entropies in enumerate(head_entropies(layers)):
        cells = [f"{x:.2f}" for x in entropies]
        table.add_row(f"layer {i + 1}", *cells, largest)
    console.print(Padding(table, (0, 2)))


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description="Train a small language model whose attention is "
        "cuflash's."
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo_output"),
        help="folder for the pictures (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=command_line.number, help="training steps"
    )
    parser.add_argument(
        "--seconds",
        type=command_line.positive,
        default=45,
        help="end training after this time (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the shortest run: 40 steps"
    )
    parser.add_argument("--seed", type=int, default=0, help="at least 0")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="train with materialised attention in float64, then exit",
    )
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: at least 0")
    if not options.plain:
        command_line.check_folder(parser, "--output", options.output)
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        return run(options)
    except KeyboardInterrupt:
        return command_line.stopped("no picture was saved")


def run(options):
    console = Console(highlight=False)
    xp, config, device = choose_device()
    if options.quick:
        config = replace(
            config, steps=40, long_seqlens=config.long_seqlens[:-1]
        )
    if options.steps is not None:
        config = replace(config, steps=options.steps)
    if options.plain:
        config = replace(
            config,
            attention=Materialised(np.float64, xp),
            attention_dtype=np.float64,
        )
        device = f"{device}, without cuflash"
    corpus = Corpus(load_text())
    model = Transformer(config, len(corpus.vocabulary), xp, options.seed)
    show_start(model, corpus, device, console)

    training, validation = train(
        model,
        corpus,
        seconds=options.seconds,
        seed=options.seed,
        console=console,
    )
    show_losses(training, validation, options, config, console)
    if options.plain:
        return 0

    rng = np.random.default_rng(options.seed)
    layers = layers_of(model, corpus, rng)
    inputs = inputs_of(layers[-1], xp, rng)
    fine = show_check(*inputs, xp, console)

    long = [
        (seqlen, costs(random_inputs(seqlen, config, xp, seqlen), xp))
        for seqlen in config.long_seqlens
    ]
    batch = [(f"{config.batch} x {config.seqlen}", costs(inputs, xp))]
    batch += [(f"1 x {seqlen:,}", cost) for seqlen, cost in long]
    show_costs(batch, config, console)
    show_entropies(layers, config, console)

    count = 120 if options.quick else 320
    written = write(model, corpus, PROMPT, count, options.seed)
    console.print("\n[bold]What the model writes[/]\n")
    sample = Text(PROMPT, style="dim").append(written, style="default")
    console.print(Padding(sample, (0, 2, 0, 4)))

    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    pictures.draw_loss(
        folder / "loss.png", training, validation, len(corpus.vocabulary)
    )
    pictures.picture_attention(folder / "attention.png", model, corpus)
    pictures.draw_memory(folder / "memory.png", long)
    console.print(
        f"\n[bold]Pictures[/] in {folder}: loss.png, attention.png, memory.png"
    )
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
