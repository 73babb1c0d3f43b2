"""Every equation of cuflash in NumPy, written to be read.

float64 throughout; arrays have any leading axes, then tokens, then a head's
columns. Read `softmax` and `tile_state` first, then `attention` (every
matrix in the open), then `forward` and `backward` (the tiled algorithms).
`machine`, `traffic` and `roofline` count what these cost, `multihead` puts
the projections around them, and `running` is the same idea elsewhere.
What a call may ask for besides is in `options`, with `masks` (who sees
whom), `scores` (what happens to a score) and `dropout`; `packed` has
sequences of several lengths end to end.

Besides papers, four sets of notes are cited throughout:

[000] "Flash attention", problems on a machine with a few registers.
[001] "Flash Attention", an article with the blockwise equations.
[002] "From Attention Basics to Memory-Efficient Implementation", with an
      example worked by hand.
[003] C.-H. Chu, Y.-X. Liu and C.-J. Lin, "An Introduction to
      FlashAttention", slides, 2026.
"""

from . import (
    attention,
    backward,
    dropout,
    forward,
    machine,
    masks,
    multihead,
    options,
    packed,
    roofline,
    running,
    scores,
    softmax,
    tile_state,
    traffic,
)

__all__ = [
    "attention",
    "backward",
    "dropout",
    "forward",
    "machine",
    "masks",
    "multihead",
    "options",
    "packed",
    "roofline",
    "running",
    "scores",
    "softmax",
    "tile_state",
    "traffic",
]
