// Flags of rows that sm90/jvp.cu leaves to simt/jvp.cu, one for 16 rows of a head.
#pragma once
#include "common/types.cuh"

constexpr int FLAG_ROWS = 16;

// slice: batches of all directions.
template <class Arguments>
inline int* recompute_flag_of_rows(const Arguments& args, int slice, int head, int row) {
    const Shape& shape = args.arrays.shape;
    const int flags_of_head = (shape.seqlen_q + FLAG_ROWS - 1) / FLAG_ROWS;
    return args.recompute_flags
         + (i64{slice} * shape.num_heads_q + head) * flags_of_head + row / FLAG_ROWS;
}

template <class Arguments>
inline bool has_set_flag(
    const Arguments& args, int slice, int head, int first_row, int num_rows) {
    const int end = min(first_row + num_rows, args.arrays.shape.seqlen_q);
    for (int row = first_row; row < end; row += FLAG_ROWS)
        if (*recompute_flag_of_rows(args, slice, head, row) != 0) return true;
    return false;
}

// Whether a flag of num_rows rows is set. Calls without flags compute all rows.
template <class Arguments> inline bool has_flag(const Arguments&, int, int, int, int) {
    return true;
}
inline bool has_flag(
    const JvpWgmmaArguments& args, int slice, int head, int first_row, int num_rows) {
    return has_set_flag(args, slice, head, first_row, num_rows);
}
inline bool has_flag(
    const JvpWgmmaExpressionArguments& args, int slice, int head, int first_row, int num_rows) {
    return has_set_flag(args, slice, head, first_row, num_rows);
}
