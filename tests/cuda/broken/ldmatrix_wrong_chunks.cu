// x y^T by mma.sync; ldmatrix loads two quarters of x swapped.
#include "common/ptx.cuh"

struct Arguments { const float* x; const float* y; float* out; };

extern "C" __global__ void ldmatrix_wrong_chunks(const __grid_constant__ Arguments a) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    u32* words = reinterpret_cast<u32*>(shared_bytes);          // x, then y: 16 rows of 16 elements
    for (int i = lane; i < 256; i += 32)
        words[i] = pack<float16>(i < 128 ? a.x[2 * i] : a.y[2 * i - 256],
                                 i < 128 ? a.x[2 * i + 1] : a.y[2 * i - 255]);
    __syncwarp();
    const int row = BROKEN ? lane / 16 * 8 + lane % 8 : lane % 16;
    const int chunk = BROKEN ? lane / 8 % 2 : lane / 16;
    u32 left[4], right[4];
    ldmatrix_x4(left, shared_address(words + row * 8 + chunk * 4));
    const int y_row = 16 + lane / 16 * 8 + lane % 8, y_chunk = lane / 8 % 2;
    ldmatrix_x4(right, shared_address(words + y_row * 8 + y_chunk * 4));
    for (int n = 0; n < 2; ++n) {
        float d[4] = {0, 0, 0, 0};
        mma_16x8x16(d, left, right[2 * n], right[2 * n + 1], float16{});
        for (int i = 0; i < 4; ++i) a.out[(g + i / 2 * 8) * 16 + n * 8 + 2 * t + i % 2] = d[i];
    }
}
