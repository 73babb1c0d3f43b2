// CUDA C++ for a host compiler: the keywords and built-in functions that the kernels use.
//
// It includes no header of the C++ library: each kernel is compiled with it, and <type_traits>
// alone takes longer than all that stands here.
#pragma once
#include "engine.h"
#include "library.h"

extern "C" void* memcpy(void*, const void*, __SIZE_TYPE__) noexcept;

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#ifdef __clang__
#define __forceinline__ inline __attribute__((always_inline))
#else
// g++ itself decides: a kernel that inlines all of its functions is a fifth larger, and takes a
// quarter more time to compile. It inlines the small ones, whose multiply-adds then fuse.
#define __forceinline__ inline
#endif
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// A function that a program has once and calls: most of g++'s time is what kernels inline at many
// places. For functions of scalars: what a caller passes by reference would leave its registers.
#define EMULATOR_CALLED __attribute__((noinline)) inline
// One whose caller is the kernel, for the engine.
#define EMULATOR_INLINED inline __attribute__((always_inline))

// 16 bytes that are read and written at once. Otherwise the compiler would split the accesses and
// omit unused parts.
template <class T> struct alignas(16) FourOf {
    T x, y, z, w;
    FourOf() = default;
    FourOf(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
    FourOf(const FourOf& other) { *this = other; }
    FourOf& operator=(const FourOf& other) {
        typedef int Whole __attribute__((vector_size(16), may_alias));
        *reinterpret_cast<volatile Whole*>(this) = *reinterpret_cast<const volatile Whole*>(&other);
        return *this;
    }
};
using uint4 = FourOf<unsigned>;
using int4 = FourOf<int>;
using float4 = FourOf<float>;
template <class T> struct alignas(16) TwoOf {
    T x, y;
    TwoOf() = default;
    TwoOf(T x, T y) : x(x), y(y) {}
    TwoOf(const TwoOf& other) { *this = other; }
    TwoOf& operator=(const TwoOf& other) {
        typedef int Whole __attribute__((vector_size(16), may_alias));
        *reinterpret_cast<volatile Whole*>(this) = *reinterpret_cast<const volatile Whole*>(&other);
        return *this;
    }
};
using double2 = TwoOf<double>;
inline double2 make_double2(double x, double y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- Arithmetic ----

// The C library functions that kernels call. Including <cmath> would take half of a small kernel's
// compile time.
#define EMULATOR_DECLARES_FLOAT(f) float f(float);
#define EMULATOR_DECLARES_FLOATS(f) float f(float, float);
#define EMULATOR_DECLARES_DOUBLE(f) double f(double);
#define EMULATOR_DECLARES_DOUBLES(f) double f(double, double);
extern "C" {
EMULATOR_OF_FLOAT(EMULATOR_DECLARES_FLOAT)
EMULATOR_OF_FLOATS(EMULATOR_DECLARES_FLOATS)
EMULATOR_OF_DOUBLE(EMULATOR_DECLARES_DOUBLE)
EMULATOR_OF_DOUBLES(EMULATOR_DECLARES_DOUBLES)
float fmaf(float, float, float);
double fma(double, double, double);
}
inline float fabs(float x) { return fabsf(x); }
inline float fmax(float a, float b) { return fmaxf(a, b); }
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float fmod(float a, float b) { return fmodf(a, b); }
inline float pow(float a, float b) { return powf(a, b); }
inline float copysign(float a, float b) { return copysignf(a, b); }
inline float exp(float x) { return expf(x); }
inline float exp2(float x) { return exp2f(x); }
inline float expm1(float x) { return expm1f(x); }
inline float log(float x) { return logf(x); }
inline float log2(float x) { return log2f(x); }
inline float log10(float x) { return log10f(x); }
inline float log1p(float x) { return log1pf(x); }
inline float tanh(float x) { return tanhf(x); }
inline float atan(float x) { return atanf(x); }
inline float erf(float x) { return erff(x); }
inline float erfc(float x) { return erfcf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float sin(float x) { return sinf(x); }
inline float cos(float x) { return cosf(x); }
inline float floor(float x) { return floorf(x); }
inline float ceil(float x) { return ceilf(x); }
inline float trunc(float x) { return truncf(x); }
inline float rint(float x) { return rintf(x); }

namespace emulator {

template <class A, class B> using Common = decltype(false ? A() : B());
template <class A, class B> constexpr bool INTEGERS = A(1) / 2 == 0 && B(1) / 2 == 0;

}  // namespace emulator

// Integers only. CUDA's min and max of floats ignore NaN.
template <class A, class B> constexpr emulator::Common<A, B> min(A a, B b) {
    static_assert(emulator::INTEGERS<A, B>, "fminf takes floats");
    return b < a ? b : a;
}
template <class A, class B> constexpr emulator::Common<A, B> max(A a, B b) {
    static_assert(emulator::INTEGERS<A, B>, "fmaxf takes floats");
    return a < b ? b : a;
}

// The lowest set bit, counted from 1, or 0 if none is set; how many bits above the highest set one
// are 0; the number of set bits.
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline float __int_as_float(int bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline double __longlong_as_double(long long bits) {
    double x;
    __builtin_memcpy(&x, &bits, 8);
    return x;
}
inline long long __double_as_longlong(double x) {
    long long bits;
    __builtin_memcpy(&bits, &x, 8);
    return bits;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline int __float_as_int(float x) {
    int bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(__float_as_int(x)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<unsigned>(bytes >> (selector >> (i * 4) & 7) * 8 & 0xFF) << (i * 8);
    return result;
}

// A product that is not fused with an addition. The compiler may fuse other products, as NVRTC
// does.
inline float __fmul_rn(float a, float b) {
    float product = a * b;
    asm("" : "+m"(product));
    return product;
}
inline double __dmul_rn(double a, double b) {
    double product = a * b;
    asm("" : "+m"(product));
    return product;
}

// To nearest even; NaN becomes 0, what is too large the largest integer.
inline int __float2int_rn(float x) {
    if (!(fabsf(x) < 0x1p31f)) return x > 0 ? 0x7FFFFFFF : x < 0 ? -0x7FFFFFFF - 1 : 0;
    return static_cast<int>(rintf(x));
}

// Fast; on a GPU, the error is up to 2 ulp.
inline float __fdividef(float a, float b) { return a / b; }

// ---- Synchronisation ----

inline void __syncthreads(EMULATOR_SITE) {
    emulator::wait_for_block("__syncthreads", false, {file, line});
}
inline int __syncthreads_or(int predicate, EMULATOR_SITE) {
    return emulator::wait_for_block("__syncthreads_or", predicate != 0, {file, line});
}
inline void __syncwarp(unsigned mask = emulator::WHOLE_WARP, EMULATOR_SITE) {
    emulator::meet_and_order(mask, {file, line});
}

template <class T>
EMULATOR_CALLED T __shfl_xor_sync(unsigned mask, T value, int lane_mask, EMULATOR_SITE) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    T result;
    emulator::shuffle("__shfl_xor_sync", mask, &value, &result, sizeof(T), (lane ^ lane_mask) & 31,
                      {file, line});
    return result;
}

template <class T>
EMULATOR_CALLED T __shfl_sync(unsigned mask, T value, int source, EMULATOR_SITE) {
    T result;
    emulator::shuffle("__shfl_sync", mask, &value, &result, sizeof(T), source & 31, {file, line});
    return result;
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return emulator::ballot(mask, predicate != 0, {file, line});
}

// ---- Global memory ----

inline void __threadfence() {}          // stores become visible in program order anyway

template <class T> EMULATOR_CALLED T atomicAdd(T* target, T x, EMULATOR_SITE) {
    static_assert(T(1) / 2 < T(1) && sizeof(T) >= 4, "of numbers, as kernels use it");
    emulator::check_global(target, sizeof(T), sizeof(T), emulator::Access::WRITE, {file, line});
    const T old = *target;
    *target = old + x;
    return old;
}

// ---- The launch ----

namespace emulator {

// Calls a kernel with its only argument, the struct at `argument`.
template <class Argument> void call(void (*kernel)(Argument), const void* argument) {
    kernel(*static_cast<const Argument*>(argument));
}

}  // namespace emulator

// The last line of a kernel's text: the function that engine.cpp starts in every thread.
#define EMULATOR_ENTRY(kernel) \
    extern "C" void emulator_entry(const void* argument) { emulator::call(kernel, argument); }
