"""A fake GPU for sweeps: the tile determines the time."""

import os
import time
from dataclasses import replace

from cuflash.plans.plan import device_of_arch

MACHINE = {
    "device": "A fake GPU",
    "num_sms": 108,
    "driver": "1.2",
    "nvrtc": "13.0",
}


class FakeGpu:
    """All tiles are correct; those with 16 keys are the fastest."""

    def describe(self):
        return replace(
            device_of_arch("sm_80"), name=MACHINE["device"], bandwidth=1555
        ), dict(MACHINE)

    def check(self, group, tile):
        return {"error": 0.5, "registers": 40, "local_bytes": 0}

    def time(self, cell, family, tiles, today, seconds):
        return [self.row(cell, tile) for tile in tiles]

    def row(self, cell, tile):
        ms = cell.seqlen * (1 + abs(tile.block_k - 16)) / 1000
        return {"quick_ms": ms, "hopeless": False, "ms": ms, "spread": 0.01,
                "count": 9, "error": 0.5}  # fmt: skip


class WrongTiles(FakeGpu):
    """One tile hangs, one ends the process, one is wrong."""

    def check(self, group, tile):
        if tile.block_k == 32:
            time.sleep(1000)
        if tile.block_k == 16:
            os._exit(7)
        if tile.block_k == 8:
            raise ValueError("out is off by 3\nand more lines")
        return super().check(group, tile)


class NothingToDo(FakeGpu):
    """Raises if a tile is checked or timed."""

    def check(self, group, tile):
        raise AssertionError

    time = check


class NoGpuHere:
    def __init__(self):
        raise RuntimeError("no driver")
