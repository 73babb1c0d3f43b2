// Row statistics of a query tile for sm90/double_backward.cu. prepare/second_rows.cu writes one
// SecondRows for each tile of each (batch, head), one after another; the producer copies it in bulk
// together with the tile's Q.
#pragma once
#include "sm90/row_stats.cuh"

struct alignas(16) SecondRows : QueryRows {
    float b[BLOCK_Q];                                       // the tangent of lse
    float product[BLOCK_Q];                                 // F = rowsum(dO * ddO)
};
