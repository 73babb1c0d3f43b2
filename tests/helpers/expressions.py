"""Recorded functions for tests of plans and kernels."""

from cuflash.expressions.trace import ArrayKind, Given, record

MOD_ARRAYS = (ArrayKind("float32", 2, (1,)),)
_GIVEN = Given((("table", MOD_ARRAYS[0]),))


def _score(score, b, h, q_idx, kv_idx, *, table):
    return score * 0.5 + table[h, q_idx - kv_idx]


def _mask(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0


SCORE_MOD, _ = record(_score, "score_mod", _GIVEN)
MASK_MOD, _ = record(_mask, "mask_mod", Given())
