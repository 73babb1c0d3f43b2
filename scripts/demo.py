"""Train a small transformer, whose attention is cuflash's, to sort words.

It reads lists of words in any order and learns to write them in alphabetical
order, of which nobody told it. Its forward and backward passes are written out
by hand in array code (demo_parts/model.py), on the GPU through CuPy or on the
CPU through NumPy; attention and its gradients are calls of cuflash.

    python scripts/demo.py            # under a minute on two CPU cores
    python scripts/demo.py --quick    # about ten seconds
    python scripts/demo.py --plain    # the same training without cuflash

After training it sorts new lists, compares cuflash on the model's own queries,
keys and values with attention that materialises the scores, shows the time and
memory of both, prints how widely each head looks, and saves three pictures;
attention.png shows how it sorts. With --plain, training uses materialised
attention in float64, to show that it reaches the same loss.
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
from demo_parts.generation import generate, greedy
from demo_parts.lists import Lists, share_in_order
from demo_parts.model import Transformer
from demo_parts.tables import plain_table
from demo_parts.training import train


def layers_of(model, lists, rng):
    """Return (x, q, k, v, out, lse) of each layer, on new lists."""
    tokens, _ = lists.batch(lists.validation, model.config, rng)
    _, saved = model.forward(model.xp.asarray(tokens))
    return [saved[f"{i}.attention"] for i in range(model.config.num_layers)]


def inputs_of(layer, xp, rng):
    """Return dout (random) and q, k, v of a layer."""
    _, q, k, v, _, _ = layer
    dout = xp.asarray(rng.standard_normal(v.shape, dtype=np.float32))
    return dout.astype(v.dtype, copy=False), q, k, v


def show_start(model, lists, device, console):
    config = model.config
    console.print(
        f"[bold]cuflash {cuflash.__version__}[/] on {device}\n"
        f"  task: put {config.seqlen // 2} of {len(lists.train)} words in "
        "alphabetical order\n"
        f"  model: {config.num_layers} layers, {config.num_heads} heads of "
        f"{config.head_dim}, {len(model.values):,} parameters\n"
        f"  batch: {config.batch} lists, each in both orders\n"
    )


def show_losses(training, validation, options, config, console):
    if training[-1][0] < config.steps:
        console.print(f"  stopped by --seconds {options.seconds:g}")
    console.print(
        f"  on new lists the loss fell from {validation[0][1]:.2f} to "
        f"{validation[-1][1]:.2f} nats a word"
    )


def show_sorting(model, lists, rng, console):
    """Let the model write a new list in order; then count how often it can."""
    one = replace(model.config, batch=1)
    tokens, _ = lists.batch(lists.validation, one, rng)
    length = tokens.shape[1] // 2
    start = tokens[0, : length + 1].tolist()  # with the colon
    words = set(start[:-1])
    written, _ = generate(model, start, length, greedy)
    text = Text()
    for token in written:
        style = "green" if token in words else "bold red"
        text.append(lists.decode([token]), style=style).append(" ")
    console.print("\n[bold]A new list[/], and what the model writes\n")
    shown = Text(lists.decode(start[:-1]), style="dim")
    for x in (shown, "", text):
        console.print(Padding(x, (0, 2, 0, 4)))
    missing = len(words - set(written))
    share = share_in_order(model, lists, rng)
    console.print(
        f"\n  Missing: {missing} of the {length} words. Of 256 new lists "
        f"{share:.0%} are without a fault."
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
        description="Train a small transformer, whose attention is "
        "cuflash's, to sort words."
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
        "--quick", action="store_true", help="the shortest run: 120 steps"
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
            config, steps=120, long_seqlens=config.long_seqlens[:-1]
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
    lists = Lists()
    model = Transformer(config, len(lists.vocabulary), xp, options.seed)
    show_start(model, lists, device, console)

    training, validation = train(
        model,
        lists,
        seconds=options.seconds,
        seed=options.seed,
        console=console,
    )
    show_losses(training, validation, options, config, console)
    if options.plain:
        return 0

    # Lists that training never drew.
    rng = np.random.default_rng((options.seed, 1))
    show_sorting(model, lists, rng, console)
    layers = layers_of(model, lists, rng)
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

    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    pictures.draw_loss(
        folder / "loss.png", training, validation, len(lists.vocabulary)
    )
    pictures.picture_attention(folder / "attention.png", model, lists, rng)
    pictures.draw_memory(folder / "memory.png", long)
    console.print(
        f"\n[bold]Pictures[/] in {folder}: loss.png, attention.png, memory.png"
    )
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
