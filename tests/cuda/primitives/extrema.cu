// min and max: one pair per thread. Constants: T.
#include "common/ptx.cuh"

struct Arguments { const T* a; const T* b; T* least; T* most; };

extern "C" __global__ void extrema(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.least[i] = min(a.a[i], a.b[i]);
    a.most[i] = max(a.a[i], a.b[i]);
}
