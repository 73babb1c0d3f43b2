// fmaxf and fabsf, or fmax and fabs: the larger of two numbers, and the first one's magnitude. One
// pair per thread. Constants: T.
#include "common/ptx.cuh"

struct Arguments { const T* a; const T* b; T* most; T* magnitude; };

inline float larger(float a, float b) { return fmaxf(a, b); }
inline double larger(double a, double b) { return fmax(a, b); }
inline float magnitude(float x) { return fabsf(x); }
inline double magnitude(double x) { return fabs(x); }

extern "C" __global__ void magnitudes(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a.most[i] = larger(a.a[i], a.b[i]);
    a.magnitude[i] = magnitude(a.a[i]);
}
