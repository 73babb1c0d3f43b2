"""Every equation of cuflash in NumPy, written to be read.

All arithmetic is float64. Arrays have any leading axes, then tokens, then the
columns of a head: heads come before tokens, unlike in `cuflash.forward`, so
arrays of three or four axes need ``heads_first=True``.

Read `softmax` and `tile_state` first, then `attention` (every matrix
materialised; `jacobians` derives its gradient), then `forward` and `backward`
(the tiled algorithms; `original` is FlashAttention as first published), `jvp`
and `double_backward` (their derivatives, along `tangents`). `readouts` are
numbers inside the softmax, without its matrix.
`machine`, `traffic` (`early_schedules`: what the sources try first),
`intensity` and `roofline` count their costs, `multihead` adds the projections,
and `running` applies the idea of online softmax to the variance.
`options` combines the options of a call: `masks` (which query sees which
key), `scores` (score modifications), `expressions` (a user's own of both) and
`dropout`. `packed` handles packed
sequences: several lengths, end to end in one array. `rotary` rotates queries
and keys by their positions, and `kvcache` attends to a cache of keys and
values that grows. `context_parallel` schedules ranks that share a sequence.

Sources
-------
Five sets of notes are cited throughout. The first three name no author.

- [000] "Flash attention", problems on a machine with a few registers.
- [001] "Flash Attention", an article with the blockwise equations.
- [002] "From Attention Basics to Memory-Efficient Implementation", with an
  example worked by hand.
- [003] Chin-Hui Chu, Ya-Xu Liu and Chih-Jen Lin, "An Introduction to
  FlashAttention", slides, 2026.
- [004] jshn9515, "FlashAttention-1: Eliminating IO", a chapter with a demo in
  single precision, 2026.

Papers:

- [AL] Ofir Press, Noah A. Smith and Mike Lewis, "Train Short, Test Long:
  Attention with Linear Biases Enables Input Length Extrapolation", 2021,
  arXiv:2108.12409.
- [CGL] Tony F. Chan, Gene H. Golub and Randall J. LeVeque, "Algorithms for
  Computing the Sample Variance", 1983, doi:10.1080/00031305.1983.10483115.
- [FA] Tri Dao, Daniel Y. Fu, Stefano Ermon, Atri Rudra and Christopher Ré,
  "FlashAttention: Fast and Memory-Efficient Exact Attention with
  IO-Awareness", 2022, arXiv:2205.14135.
- [FA2] Tri Dao, "FlashAttention-2: Faster Attention with Better Parallelism
  and Work Partitioning", 2023, arXiv:2307.08691.
- [FX] Juechu Dong, Boyuan Feng, Driss Guessous, Yanbo Liang and Horace He,
  "Flex Attention: A Programming Model for Generating Optimized Attention
  Kernels", 2024, arXiv:2412.05496.
- [G2] Gemma Team, "Gemma 2: Improving Open Language Models at a Practical
  Size", 2024, arXiv:2408.00118.
- [LF] Iz Beltagy, Matthew E. Peters and Arman Cohan, "Longformer: The
  Long-Document Transformer", 2020, arXiv:2004.05150.
- [M] Albert Q. Jiang and others, "Mistral 7B", 2023, arXiv:2310.06825.
- [MG] Maxim Milakov and Natalia Gimelshein, "Online normalizer calculation
  for softmax", 2018, arXiv:1805.02867.
- [PA] Woosuk Kwon, Zhuohan Li, Siyuan Zhuang, Ying Sheng, Lianmin Zheng, Cody
  Hao Yu, Joseph E. Gonzalez, Hao Zhang and Ion Stoica, "Efficient Memory
  Management for Large Language Model Serving with PagedAttention", 2023,
  arXiv:2309.06180.
- [PH] John K. Salmon, Mark A. Moraes, Ron O. Dror and David E. Shaw,
  "Parallel random numbers: as easy as 1, 2, 3", 2011,
  doi:10.1145/2063384.2063405.
- [PK] Mario Michael Krell, Matej Kosec, Sergio P. Perez and Andrew
  Fitzgibbon, "Efficient Sequence Packing without Cross-contamination", 2021,
  arXiv:2107.02027.
- [R] Samuel Williams, Andrew Waterman and David Patterson, "Roofline: An
  Insightful Visual Performance Model for Multicore Architectures", 2009,
  doi:10.1145/1498765.1498785.
- [RA] Hao Liu, Matei Zaharia and Pieter Abbeel, "Ring Attention with Blockwise
  Transformers for Near-Infinite Context", 2023, arXiv:2310.01889.
- [RF] Jianlin Su, Yu Lu, Shengfeng Pan, Ahmed Murtadha, Bo Wen and Yunfeng
  Liu, "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
  arXiv:2104.09864.
- [SK] Guangxuan Xiao, Yuandong Tian, Beidi Chen, Song Han and Mike Lewis,
  "Efficient Streaming Language Models with Attention Sinks", 2023,
  arXiv:2309.17453.
- [W] B. P. Welford, "Note on a Method for Calculating Corrected Sums of
  Squares and Products", 1962, doi:10.1080/00401706.1962.10490022.
"""

from . import (
    attention,
    backward,
    context_parallel,
    double_backward,
    dropout,
    early_schedules,
    expressions,
    forward,
    intensity,
    jacobians,
    jvp,
    kvcache,
    lse_rest,
    machine,
    masks,
    multihead,
    options,
    original,
    packed,
    readouts,
    roofline,
    rotary,
    running,
    scores,
    softmax,
    tangents,
    tile_state,
    traffic,
)

__all__ = [
    "attention",
    "backward",
    "context_parallel",
    "double_backward",
    "dropout",
    "early_schedules",
    "expressions",
    "forward",
    "intensity",
    "jacobians",
    "jvp",
    "kvcache",
    "lse_rest",
    "machine",
    "masks",
    "multihead",
    "options",
    "original",
    "packed",
    "readouts",
    "roofline",
    "rotary",
    "running",
    "scores",
    "softmax",
    "tangents",
    "tile_state",
    "traffic",
]
