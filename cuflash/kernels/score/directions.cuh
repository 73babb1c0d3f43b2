// How a JVP's directions are divided among blocks: consecutive groups of DIRECTIONS, which share
// S, P and O. If the last group has fewer, a second launch computes its one direction. Where two O'
// do not fit, the first direction is a launch of its own, and the others read its O.
#pragma once
#include "common/constants.cuh"

static_assert(DIRECTIONS == 1 || !(FIRST_DIRECTION || LAST_DIRECTION), "a direction alone");

inline int num_direction_groups(const TangentNumbers& tangents) {
    if (FIRST_DIRECTION || LAST_DIRECTION) return 1;
    return (tangents.num_directions - READS_OUT) / DIRECTIONS;
}

inline int first_direction_of(int group, const TangentNumbers& tangents) {
    return LAST_DIRECTION ? tangents.num_directions - 1 : READS_OUT + group * DIRECTIONS;
}
