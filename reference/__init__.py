"""Every equation of cuflash in NumPy, written to be read.

All arithmetic is float64. Arrays have any leading axes, then tokens, then the
columns of a head: heads come before tokens, unlike in `cuflash.forward`, so
arrays of three or four axes need ``heads_first=True``.

Read `softmax` and `tile_state` first, then `attention` (every matrix
materialised), then `forward` and `backward` (the tiled algorithms).
`machine`, `traffic` and `roofline` count their costs, `multihead` adds the
projections, and `running` applies the idea of online softmax to the variance.
`options` combines the options of a call: `masks` (which query sees which
key), `scores` (score modifications) and `dropout`. `packed` handles packed
sequences: several lengths, end to end in one array. `rotary` rotates queries
and keys by their positions, and `kvcache` attends to a cache of keys and
values that grows.

In addition to papers, four sets of notes are cited throughout:

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
    kvcache,
    machine,
    masks,
    multihead,
    options,
    packed,
    roofline,
    rotary,
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
    "kvcache",
    "machine",
    "masks",
    "multihead",
    "options",
    "packed",
    "roofline",
    "rotary",
    "running",
    "scores",
    "softmax",
    "tile_state",
    "traffic",
]
