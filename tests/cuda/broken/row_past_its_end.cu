// Reads one float past the end of a row of shared memory: the next row's first.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void row_past_its_end(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& rows = *reinterpret_cast<float (*)[16][4]>(shared_bytes);
    const int row = threadIdx.x / 4, column = threadIdx.x % 4;
    rows[row][column] = a.x[threadIdx.x];
    __syncthreads();
    if (row < 15) a.out[threadIdx.x] = rows[row][column + (BROKEN ? 1 : 0)];    // caught here
    else a.out[threadIdx.x] = rows[row][column];
}
