// Writes a float of the gap between two rows: 4 columns, row stride 6.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void gap_written(const __grid_constant__ Arguments a) {
    const int row = threadIdx.x / 4, column = threadIdx.x % 4;
    a.out[row * 6 + column + (BROKEN ? 1 : 0)] = a.x[row * 6 + column];  // caught here
}
