"""Which module checks the arguments of a call, under the call's name."""

from cuflash.request.validate import (
    attention,
    derivatives,
    kvcache,
    merging,
    rotary,
)

CHECKED_BY = {
    "forward": attention,
    "backward": attention,
    "jvp": derivatives,
    "double_backward": derivatives,
    "merge_states": merging,
    "apply_rotary": rotary,
    "forward_kvcache": kvcache,
}


def check(call, **given):
    """Check the arguments of a call, by its name."""
    return getattr(CHECKED_BY[call], call)(**given)
