// How a JVP's directions are divided among blocks: consecutive groups of DIRECTIONS, which share
// S, P and O. If the last group has fewer, a second launch computes its one direction.
//
// Constants: DIRECTIONS, 1 or 2; LAST_DIRECTION: the launch has the last direction alone.
#pragma once
#include "common/types.cuh"

static_assert(!LAST_DIRECTION || DIRECTIONS == 1, "the last direction is alone");

inline int num_direction_groups(const TangentNumbers& tangents) {
    return LAST_DIRECTION ? 1 : tangents.num_directions / DIRECTIONS;
}

inline int first_direction_of(int group, const TangentNumbers& tangents) {
    return LAST_DIRECTION ? tangents.num_directions - 1 : group * DIRECTIONS;
}
