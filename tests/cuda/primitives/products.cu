// __fmul_rn or __dmul_rn, and fma: a b - c with the product rounded by itself, and without. One
// number per thread. Constants: T.
#include "common/ptx.cuh"

struct Arguments { const T* a; const T* b; const T* c; T* rounded; T* fused; };

inline float product(float a, float b) { return __fmul_rn(a, b); }
inline double product(double a, double b) { return __dmul_rn(a, b); }

extern "C" __global__ void products(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.rounded[i] = product(a.a[i], a.b[i]) - a.c[i];
    a.fused[i] = fma(a.a[i], a.b[i], -a.c[i]);
}
