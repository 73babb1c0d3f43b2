// wgmma_shared, or wgmma_registers if REGISTERS, on sm_90a: D = SIGN A B, or C + SIGN A B if
// `accumulate`, by one warpgroup. Row-major in global memory: a (64, 16) and b (16, COLUMNS), of
// Element; c and d (64, COLUMNS). A and B stand in shared memory with rows of A and columns of B
// contiguous, or the other way round where they are TRANSPOSED.
// Constants: Element, COLUMNS, REGISTERS, SIGN, A_TRANSPOSED, B_TRANSPOSED.
// Shared memory: A 8192 bytes, then B^T, 128 bytes a column, or B, 2048 bytes a panel.
#include "sm90/wgmma.cuh"

struct Arguments { const Element* a; const Element* b; const float* c; float* d; int accumulate; };

// Where register i of a thread stands in D.
inline int place(int i) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    return row * COLUMNS + i / 4 * 8 + lane % 4 * 2 + i % 2;
}

extern "C" __global__ void __launch_bounds__(WARPGROUP)
multiply_warpgroup(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const u32 a_tile = shared_address(shared_bytes), b_tile = a_tile + 64 * PANEL_ROW_BYTES;
    for (int i = threadIdx.x; i < 64 * 16; i += WARPGROUP) {
        const int row = i / 16, column = i % 16;
        const u32 at = A_TRANSPOSED ? tile_offset<16>(column, row) : tile_offset<64>(row, column);
        store_shared(a_tile + at, arguments.a[i].bits);
    }
    for (int i = threadIdx.x; i < 16 * COLUMNS; i += WARPGROUP) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const u32 at =
            B_TRANSPOSED ? tile_offset<16>(row, column) : tile_offset<COLUMNS>(column, row);
        store_shared(b_tile + at, arguments.b[i].bits);
    }
    fence_async_proxy();
    __syncthreads();

    float d[COLUMNS / 2];
    #pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) d[i] = arguments.c[place(i)];
    u32 fragment[4];
    for (int i = 0; i < 4; ++i) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
        const Element* at = arguments.a + row * 16 + threadIdx.x % 4 * 2 + i / 2 * 8;
        fragment[i] = at[0].bits | static_cast<u32>(at[1].bits) << 16;
    }
    const bool accumulate = arguments.accumulate != 0;
    wgmma_fence();
    const u64 b = descriptor(b_tile, B_TRANSPOSED ? 16 * PANEL_ROW_BYTES : 0);
    if constexpr (REGISTERS)
        wgmma_registers<SIGN, B_TRANSPOSED>(d, fragment, b, accumulate, Element{});
    else
        wgmma_shared<SIGN, A_TRANSPOSED, B_TRANSPOSED>(
            d, descriptor(a_tile, 0), b, accumulate, Element{});
    wgmma_commit();
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    #pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) arguments.d[place(i)] = d[i];
}
