"""Sequences longer than one device: context parallelism.

`forward` and `backward` are `cuflash.forward` and `cuflash.backward` for
sequences that the ranks of a `Group` share: ring attention, all-to-all over
heads (Ulysses), or their product. `shard` cuts a whole array, `gather` joins
it again. docs/guide/distributed.md explains when to use what.
"""

from __future__ import annotations

from .attention import backward, forward
from .environment import group_from_environment
from .gathering import gather
from .group import Group
from .in_process import run as run_threads
from .layouts import positions, shard, unshard
from .mpi import MpiGroup
from .nccl import NcclGroup, unique_id
from .peers import PeerGroup

__all__ = [
    "Group",
    "MpiGroup",
    "NcclGroup",
    "PeerGroup",
    "backward",
    "forward",
    "gather",
    "group_from_environment",
    "positions",
    "run_threads",
    "shard",
    "unique_id",
    "unshard",
]
