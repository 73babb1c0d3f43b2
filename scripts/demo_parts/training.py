"""Adam and the training loop."""

from __future__ import annotations

import math
import time

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Adam:
    """Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015."""

    def __init__(self, model, beta1=0.9, beta2=0.98, tiny=1e-8):
        self.model = model
        self.mean = model.xp.zeros_like(model.values)
        self.square = model.xp.zeros_like(model.values)
        self.beta1, self.beta2, self.tiny = beta1, beta2, tiny
        self.count = 0

    def step(self, rate):
        self.count += 1
        g = self.model.gradient
        self.mean += (1 - self.beta1) * (g - self.mean)
        self.square += (1 - self.beta2) * (g * g - self.square)
        mean = self.mean / (1 - self.beta1**self.count)
        square = self.square / (1 - self.beta2**self.count)
        self.model.values -= rate * mean / (square**0.5 + self.tiny)


def train(model, corpus, *, seconds, seed, console):
    """Train for config.steps, or until the time is up.

    Returns two lists of (step, loss): on the training batches, and on one
    that is never trained on.
    """
    config = model.config
    optimizer = Adam(model)
    rng = np.random.default_rng(seed)
    held_out = corpus.batch(
        corpus.validation, config, np.random.default_rng(seed + 1)
    )
    training, validation = [], []
    columns = (
        TextColumn("  training"),
        BarColumn(bar_width=28),
        TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
        TextColumn("loss [bold]{task.fields[loss]}[/]"),
        TextColumn("validation [bold]{task.fields[validation]}[/]"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "", total=config.steps, loss="-", validation="-"
        )
        start = time.perf_counter()
        for step in range(1, config.steps + 1):
            # How much is done, by the steps or by the clock. The rate rises
            # for a twentieth of the training and falls along a cosine.
            spent = (time.perf_counter() - start) / seconds
            done = max((step - 1) / config.steps, spent)
            rise = min(1, step / (0.05 * config.steps))
            fall = 0.55 + 0.45 * math.cos(math.pi * min(done, 1))
            batch = corpus.batch(corpus.train, config, rng)
            training.append((step, model.loss(*batch, with_gradient=True)))
            optimizer.step(config.peak_rate * rise * fall)
            last = step == config.steps or spent >= 1
            if last or step % 25 == 0 or step == 1:
                validation.append((step, model.loss(*held_out)))
            progress.update(
                task,
                completed=step,
                loss=f"{training[-1][1]:.2f}",
                validation=f"{validation[-1][1]:.2f}",
            )
            if last:
                break
    return training, validation
