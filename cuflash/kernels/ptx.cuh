// Every instruction that CUDA C++ has no word for: one function each, no logic. Above each stands
// the section of the PTX ISA manual that describes it, by its title: section numbers change between
// versions. Lane l is the thread of index l in its warp; u32 addresses are of shared memory.
#pragma once
#include "types.cuh"

// ---- Conversions ----

// Exact. PTX ISA: cvt.
__device__ __forceinline__ float to_float(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// A bfloat16 is the upper half of a float, so a shift will do.
__device__ __forceinline__ float to_float(bfloat16 x) {
    return __uint_as_float(static_cast<u32>(x.bits) << 16);
}

// Two floats, rounded to nearest even, as two elements in one register, `low` in the lower half.
// PTX ISA: cvt. It names the upper half first.
template <typename Element> __device__ __forceinline__ u32 pack(float low, float high);

template <> __device__ __forceinline__ u32 pack<float16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <> __device__ __forceinline__ u32 pack<bfloat16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The elements of such a register.
template <typename Element> __device__ __forceinline__ Element low_half(u32 pair) {
    return {static_cast<u16>(pair)};
}

template <typename Element> __device__ __forceinline__ Element high_half(u32 pair) {
    return {static_cast<u16>(pair >> 16)};
}

// ---- Arithmetic ----

// 2^x to about 2 ulp; 2^-inf = 0, denormal x and results are flushed to 0. PTX ISA: ex2.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// D += A B, A 16 x 16, B 16 x 8, D 16 x 8 in float. The last argument only names the element type.
// Lane l holds, with g = l / 4 and t = l % 4:
//     d[0] d[1]  row g, columns 2t 2t+1           d[2] d[3]  row g + 8, the same columns
//     a[0]       row g, columns 2t 2t+1           a[1]       row g + 8, the same columns
//     a[2]       row g, columns 2t+8 2t+9         a[3]       row g + 8, the same columns
//     b0         rows 2t 2t+1 of column g         b1         rows 2t+8 2t+9 of column g
// PTX ISA: Matrix Fragments for mma.m16n8k16 with floating point type.
__device__ __forceinline__ void mma_16x8x16(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_16x8x16(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Shared memory ----

// The address within shared memory of what a pointer points to there.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same value, of which the compiler knows nothing: what follows from it is computed where it is
// used instead of being kept in registers across a loop.
__device__ __forceinline__ u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 (16 bytes) of
// matrix l / 8. Of matrix i lane l gets in r[i] row l / 4, columns 2(l % 4) and 2(l % 4) + 1;
// transposed: rows 2(l % 4) and 2(l % 4) + 1 of column l / 4. PTX ISA: ldmatrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// 4 bytes. PTX ISA: st.
__device__ __forceinline__ void store_shared(u32 address, u32 word) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(word) : "memory");
}

// 16 bytes, 16-byte aligned. PTX ISA: ld.
__device__ __forceinline__ uint4 load_shared_16(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

// PTX ISA: ld.
__device__ __forceinline__ float load_shared_float(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

// ---- Asynchronous copies, global to shared ----

// 16 bytes, both addresses 16-byte aligned. PTX ISA: cp.async.
__device__ __forceinline__ void cp_async_16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(target), "l"(source) : "memory");
}

// Of the 16 bytes only the first `bytes` (0 to 16) are read; the others become zero. PTX ISA:
// cp.async.
__device__ __forceinline__ void cp_async_16_partly(u32 target, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(target), "l"(source), "r"(bytes) : "memory");
}

// 4 bytes, or zeros if `bytes` is 0 and not 4. PTX ISA: cp.async.
__device__ __forceinline__ void cp_async_4(u32 target, const void* source, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(target), "l"(source), "r"(bytes) : "memory");
}

// This thread's copies since its last commit become one group. PTX ISA: cp.async.commit_group.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's newest groups are under way. PTX ISA:
// cp.async.wait_group.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// ---- Global memory ----

// Adds to four neighbouring floats in global memory, 16-byte aligned, without reading them back:
// one instruction from sm_90 on. PTX ISA: red.
__device__ __forceinline__ void reduce_add_4(float* target, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(target), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
    for (int i = 0; i < 4; ++i)
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;"
                     :: "l"(target + i), "f"(x[i]) : "memory");
#endif
}

// An integer that another block wrote with store_release: who reads its new value sees, from then
// on, all that the writer had written before. PTX ISA: ld.
__device__ __forceinline__ int load_acquire(const int* source) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(source) : "memory");
    return x;
}

// PTX ISA: st.
__device__ __forceinline__ void store_release(int* target, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(target), "r"(x) : "memory");
}
