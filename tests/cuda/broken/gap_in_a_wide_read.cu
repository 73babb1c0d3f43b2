// Reads 16 bytes at a time of rows that end after 12.

struct Arguments { const float* x; float* out; };

extern "C" __global__ void gap_in_a_wide_read(const __grid_constant__ Arguments a) {
    float x[4] = {0, 0, 0, 0};
    const float* row = a.x + threadIdx.x * 8;
    if constexpr (BROKEN) {
        const float4 all = *reinterpret_cast<const float4*>(row);       // caught here
        x[0] = all.x, x[1] = all.y, x[2] = all.z;
    } else {
        for (int i = 0; i < 3; ++i) x[i] = row[i];
    }
    for (int i = 0; i < 3; ++i) a.out[threadIdx.x * 8 + i] = x[i];
}
