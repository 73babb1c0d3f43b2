// Reads one float past the end of a thread-local array.

struct Arguments { const float* x; float* out; int one; };

extern "C" __global__ void local_past_the_end(const __grid_constant__ Arguments a) {
    const int first = threadIdx.x * 4;
    float row[4];
    for (int i = 0; i < 4; ++i) row[i] = a.x[first + i];
    for (int i = 0; i < 4; ++i) a.out[first + i] = row[i + (BROKEN ? a.one : 0)];  // caught here
}
