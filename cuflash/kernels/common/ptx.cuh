// The PTX instructions that CUDA C++ does not expose, one function each, without logic. A comment
// says what the instruction does and what the caller must ensure, and names the section of the PTX
// ISA manual by title, because section numbers change between versions. Lane l is the thread of
// index l in its warp. u32 addresses are addresses in the shared state space. All threads of a warp
// must execute the same .aligned instruction together.
#pragma once
#include "common/types.cuh"

// ---- Conversions ----

// Converts to float; exact. PTX ISA: cvt.
__device__ __forceinline__ float to_float(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Converts to float; exact: a bfloat16 is the upper half of a float.
__device__ __forceinline__ float to_float(bfloat16 x) {
    return __uint_as_float(static_cast<u32>(x.bits) << 16);
}

// Rounds two floats to nearest even and packs them into one register, `low` in the lower half. The
// instruction takes the upper half first. PTX ISA: cvt.
template <typename Element> __device__ __forceinline__ u32 pack(float low, float high);

template <> __device__ __forceinline__ u32 pack<float16>(float low, float high) {
    u32 pair;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("{\n"
        "    .reg .b16 low, high;\n"
        "    cvt.rn.f16.f32 low, %1;\n"
        "    cvt.rn.f16.f32 high, %2;\n"
        "    mov.b32 %0, {low, high};\n"
        "}" : "=r"(pair) : "f"(low), "f"(high));
#endif
    return pair;
}

// Below sm_80 by integers: half a unit is added, less one where the kept half is even, so that ties
// carry into odd halves only. A NaN would carry out of its exponent: it becomes the canonical one.
template <> __device__ __forceinline__ u32 pack<bfloat16>(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    const auto rounded = [](float x) {
        const u32 bits = __float_as_uint(x);
        return x == x ? bits + 0x7FFFu + (bits >> 16 & 1u) : 0x7FFF0000u;
    };
    return rounded(low) >> 16 | (rounded(high) & 0xFFFF0000u);
#endif
}

// Unpack one element of such a register.
template <typename Element> __device__ __forceinline__ Element low_half(u32 pair) {
    return {static_cast<u16>(pair)};
}

template <typename Element> __device__ __forceinline__ Element high_half(u32 pair) {
    return {static_cast<u16>(pair >> 16)};
}

// ---- Arithmetic ----

// 2^x with an error of about 2 ulp; 2^-inf = 0; subnormal inputs and results are flushed to 0. PTX
// ISA: ex2.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with an error of about 1 ulp; subnormal inputs and results are flushed to 0. PTX ISA:
// rcp.approx.ftz.f32.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a / b with an error of at most 2 ulp, also of a subnormal or a large b. PTX ISA: div.full.f32.
__device__ __forceinline__ float divide_approx(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// Whether there is redux.sync.
#if __CUDA_ARCH__ >= 800
constexpr bool HAS_REDUX = true;
#else
constexpr bool HAS_REDUX = false;
#endif

// The smallest and the largest of a warp's ints. PTX ISA: redux.sync.
__device__ __forceinline__ int redux_min(int x) {
    int least;
    asm volatile("redux.sync.min.s32 %0, %1, 0xFFFFFFFF;" : "=r"(least) : "r"(x));
    return least;
}
__device__ __forceinline__ int redux_max(int x) {
    int most;
    asm volatile("redux.sync.max.s32 %0, %1, 0xFFFFFFFF;" : "=r"(most) : "r"(x));
    return most;
}

// The products of two pairs of float16, rounded to nearest even; subnormal numbers are kept. Adding
// -0 changes nothing. PTX ISA: fma.
__device__ __forceinline__ u32 multiply_float16_pairs(u32 a, u32 b) {
    u32 pair;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000u));
    return pair;
}

// Whether there is cvt.rn.f16x2.e4m3x2.
#if __CUDA_ARCH__ >= 890
constexpr bool CONVERTS_FLOAT8 = true;
#else
constexpr bool CONVERTS_FLOAT8 = false;
#endif

// A word's four float8_e4m3fn numbers as float16, exactly: bytes 0 and 1, bytes 2 and 3. PTX ISA:
// cvt.
__device__ __forceinline__ void e4m3_to_float16(u32 (&pairs)[2], u32 word) {
    asm("{\n"
        "    .reg .b16 low, high;\n"
        "    mov.b32 {low, high}, %2;\n"
        "    cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "    cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}" : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(word));
}

// The maximum of the upper halves of m, a and b, in the upper half of the result; 0x7FFF if one of
// them is NaN or exceeds 2^121 in magnitude. The lower half of the result is meaningless. Upper
// halves compare as the float16 numbers with the same bits. One instruction on sm_90. PTX ISA:
// max.f16x2.
__device__ __forceinline__ u32 max_of_upper_halves(u32 m, float a, float b) {
    asm("{\n"
        "    max.NaN.f16x2 %0, %0, %1;\n"
        "    max.NaN.f16x2 %0, %0, %2;\n"
        "}" : "+r"(m) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)));
    return m;
}

// The same for |a| and |b|. PTX ISA: abs.f16x2, max.f16x2.
__device__ __forceinline__ u32 max_of_upper_halves_of_sizes(u32 m, float a, float b) {
    asm("{\n"
        "    .reg .b32 x, y;\n"
        "    abs.f16x2 x, %1;\n"
        "    abs.f16x2 y, %2;\n"
        "    max.NaN.f16x2 %0, %0, x;\n"
        "    max.NaN.f16x2 %0, %0, y;\n"
        "}" : "+r"(m) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)));
    return m;
}

// D += A B by one warp: A 16 x 16, B 16 x 8, D 16 x 8 floats. The last argument only selects the
// element type. Lane l holds, with g = l / 4 and t = l % 4:
//     d[0] d[1]  row g, columns 2t 2t+1           d[2] d[3]  row g + 8, the same columns
//     a[0]       row g, columns 2t 2t+1           a[1]       row g + 8, the same columns
//     a[2]       row g, columns 2t+8 2t+9         a[3]       row g + 8, the same columns
//     b0         rows 2t 2t+1 of column g         b1         rows 2t+8 2t+9 of column g
// Below sm_80 two m16n8k8: their fragments are the halves of these, columns 0 to 7 of A and rows 0
// to 7 of B first. PTX ISA: Matrix Fragments for mma.m16n8k16 with floating point type; Matrix
// Fragments for mma.m16n8k8.
__device__ __forceinline__ void mma_16x8x16(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float16) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(half == 0 ? b0 : b1));
#endif
}

__device__ __forceinline__ void mma_16x8x16(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D += A B by one warp in double: A 16 x 8, B 8 x 8, D 16 x 8. Lane l holds, with g = l / 4 and
// t = l % 4:
//     d[0] d[1]  row g, columns 2t 2t+1           d[2] d[3]  row g + 8, the same columns
//     a[0] a[2]  row g, columns t t+4             a[1] a[3]  row g + 8, the same columns
//     b0 b1      rows t t+4 of column g
// One m16n8k8 on sm_90, four m8n8k4 on other devices from sm_80 on. PTX ISA: Matrix Fragments for
// mma.m16n8k8; Matrix Fragments for mma.m8n8k4 with .f64 floating point type.
__device__ __forceinline__ void mma_16x8x8(
    double (&d)[4], const double (&a)[4], double b0, double b1) {
#if __CUDA_ARCH__ == 900
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#else
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(d[i % 2 * 2]), "+d"(d[i % 2 * 2 + 1]) : "d"(a[i]), "d"(i < 2 ? b0 : b1));
#endif
}

// The same with tf32 inputs (11 significant bits) and float accumulators; the fragments have the
// same layout. a and b are bit patterns of floats whose lower 13 bits are ignored. PTX ISA: Matrix
// Fragments for mma.m16n8k8.
__device__ __forceinline__ void mma_16x8x8(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Shared memory ----

// Converts a generic pointer into shared memory to an address in the shared state space.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Returns x, but hides its value from the compiler, which then recomputes expressions of x where
// they are used instead of keeping them in registers across a loop.
__device__ __forceinline__ u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ float* opaque(float* x) {
    asm volatile("" : "+l"(x));
    return x;
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 (16 bytes,
// 16-byte aligned) of matrix l / 8. r[i] receives of matrix i: row l / 4, columns 2(l % 4) and
// 2(l % 4) + 1; transposed, rows 2(l % 4) and 2(l % 4) + 1 of column l / 4. PTX ISA: ldmatrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements across a warp. Lane l passes row l / 4, columns
// 2(l % 4) and 2(l % 4) + 1, and receives rows 2(l % 4) and 2(l % 4) + 1 of column l / 4. PTX ISA:
// movmatrix.
__device__ __forceinline__ u32 movmatrix_transposed(u32 pair) {
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// Stores 4 bytes, 4-byte aligned. PTX ISA: st.
__device__ __forceinline__ void store_shared(u32 address, u32 word) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(word) : "memory");
}

// Stores 2 bytes, 2-byte aligned. PTX ISA: st.
__device__ __forceinline__ void store_shared(u32 address, u16 x) {
    asm volatile("st.shared.b16 [%0], %1;" :: "r"(address), "h"(x) : "memory");
}

// Stores 16 bytes, 16-byte aligned. PTX ISA: st.
__device__ __forceinline__ void store_shared_16(u32 address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Loads 16 bytes, 16-byte aligned. PTX ISA: ld.
__device__ __forceinline__ uint4 load_shared_16(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

// Loads a float. PTX ISA: ld.
__device__ __forceinline__ float load_shared_float(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

// Loads two consecutive floats, 8-byte aligned. PTX ISA: ld.
__device__ __forceinline__ void load_shared_floats(u32 address, float& x, float& y) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x), "=f"(y) : "r"(address) : "memory");
}

// ---- Asynchronous copies, global to shared ----
//
// The target may be read after cp_async_wait() in the copying thread, and by other threads after a
// barrier that follows it. From the call until then nobody uses the target or writes to the source.
//
// Below sm_80 a copy is a load and a store, complete when the function returns (COPIES_AT_ONCE);
// waiting does nothing. A cp.async may complete at once, too: kernels that are correct whenever
// copies complete are correct here.

#if __CUDA_ARCH__ >= 800
constexpr bool COPIES_AT_ONCE = false;
#else
constexpr bool COPIES_AT_ONCE = true;
#endif

// Starts the copy of the first `bytes` bytes (0 to 16); the rest of the 16 of the target become
// zero. Both addresses are 16-byte aligned. Below sm_80 whole copies are by a predicate: several
// loads can then be under way, which a branch between them prevents. PTX ISA: cp.async; ld, st.
__device__ __forceinline__ void cp_async_16_partly(u32 target, const void* source, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(target), "l"(source), "r"(bytes) : "memory");
#else
    asm volatile("{ .reg .pred p; .reg .b32 x<4>; setp.eq.b32 p, %2, 16;"
                 " mov.b32 x0, 0; mov.b32 x1, 0; mov.b32 x2, 0; mov.b32 x3, 0;"
                 " @p ld.global.v4.b32 {x0, x1, x2, x3}, [%1];"
                 " st.shared.v4.b32 [%0], {x0, x1, x2, x3}; }"
                 :: "r"(target), "l"(source), "r"(bytes) : "memory");
    if (bytes % 16 == 0) return;
    #pragma unroll 1
    for (int i = 0; i < bytes; ++i) {                       // of a row's last chunk
        const u32 byte = static_cast<const u8*>(source)[i];
        asm volatile("st.shared.b8 [%0], %1;" :: "r"(target + i), "r"(byte) : "memory");
    }
#endif
}

// The same of 16 bytes. PTX ISA: cp.async.
__device__ __forceinline__ void cp_async_16(u32 target, const void* source) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(target), "l"(source) : "memory");
#else
    cp_async_16_partly(target, source, 16);
#endif
}

// Starts the copy of 4 bytes, both addresses 4-byte aligned. `bytes` is 4, or 0 to store zeros
// without reading. PTX ISA: cp.async.
__device__ __forceinline__ void cp_async_4(u32 target, const void* source, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(target), "l"(source), "r"(bytes) : "memory");
#else
    store_shared(target, bytes == 4 ? *static_cast<const u32*>(source) : 0u);
#endif
}

// Makes one group of the copies that this thread started since its last commit. PTX ISA:
// cp.async.commit_group.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the PENDING most recent groups of this thread are incomplete. PTX ISA:
// cp.async.wait_group.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}

// ---- Programmatic dependent launch ----
//
// From sm_90 on, a kernel may start while the one before it still runs (Launch.overlaps).

// Waits until the kernels before have ended and their results are visible. PTX ISA: griddepcontrol.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once all blocks have called this or ended. PTX ISA: griddepcontrol.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Global memory ----

// Adds atomically to each of four consecutive floats in global memory, 16-byte aligned, without
// returning the old values; the four additions together are not atomic. One instruction from sm_90
// on. PTX ISA: red.
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

// Adds x atomically, modulo 2^32, to an integer in global memory without returning the old value.
// PTX ISA: red.
__device__ __forceinline__ void reduce_add_s32(int* target, int x) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" :: "l"(target), "r"(x) : "memory");
}

// Adds x atomically to a float in global memory without returning the old value; no access if x is
// 0. PTX ISA: red.
__device__ __forceinline__ void reduce_add_nonzero(float* target, float x) {
    asm volatile("{ .reg .pred p; setp.neu.f32 p, %1, 0f00000000;"
                 " @p red.relaxed.gpu.global.add.f32 [%0], %1; }"
                 :: "l"(target), "f"(x) : "memory");
}

// Loads an integer with acquire semantics at gpu scope: if it reads a value stored by
// store_release(), this thread sees every write that preceded that store. PTX ISA: ld.
__device__ __forceinline__ int load_acquire(const int* source) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(source) : "memory");
    return x;
}

// Stores an integer with release semantics at gpu scope. Writes by other threads of the block are
// covered if a barrier separates them from this store. PTX ISA: st.
__device__ __forceinline__ void store_release(int* target, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(target), "r"(x) : "memory");
}

// ======== Hopper (sm_90a) ========

// ---- Barriers in shared memory (mbarrier) ----
//
// A phase of an mbarrier completes when its pending arrivals and its tx-count (bytes expected and
// not yet copied) are both 0. The next phase then begins with the same number of arrivals. A wait
// names the phase by its parity: 0 for the first, then alternating.

// Initialises an mbarrier (8 bytes, 8-byte aligned) whose phases expect `arrivals` arrivals. One
// thread calls it; then fence_mbarrier_init() and a barrier of the block. PTX ISA: mbarrier.init.
__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals)
                 : "memory");
}

// Makes this thread's mbarrier_init() visible to the async proxy (TMA). PTX ISA: fence.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, with release semantics: a thread whose wait sees the phase complete sees the writes that
// preceded the arrival. PTX ISA: mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// The same if `condition`, by a predicate: after a branch, the lanes of a warp might not reconverge
// before the next .aligned instruction. PTX ISA: mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive_if(bool condition, u32 barrier) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0;"
                 " @p mbarrier.arrive.shared::cta.b64 _, [%0]; }"
                 :: "r"(barrier), "r"(static_cast<u32>(condition)) : "memory");
}

// Arrives once all copies by cp.async that this thread has started are complete, as one of the
// phase's expected arrivals (.noinc). A thread whose wait sees the phase complete sees what they
// wrote; the async proxy does after that thread's fence_async_proxy(). PTX ISA:
// cp.async.mbarrier.arrive.
__device__ __forceinline__ void cp_async_mbarrier_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier)
                 : "memory");
}

// Adds `bytes` to the tx-count of the current phase, then arrives. The copies that signal this
// barrier must transfer exactly that many bytes. PTX ISA: mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

// The same if `condition`, by a predicate.
__device__ __forceinline__ void mbarrier_arrive_expect_if(
    bool condition, u32 barrier, int bytes) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0;"
                 " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1; }"
                 :: "r"(barrier), "r"(bytes), "r"(static_cast<u32>(condition)) : "memory");
}

// Whether the phase of this parity has completed, with acquire semantics. May suspend the thread
// for a limited time before it returns false. PTX ISA: mbarrier.try_wait.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 ended;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return ended != 0;
}

// ---- Clusters: blocks that run at the same time and reach each other's shared memory ----

// The block's number in its cluster. PTX ISA: %cluster_ctarank.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The block's own shared memory, by the name that a kernel declares; for the emulator, where the
// blocks of a cluster have one memory.
__device__ __forceinline__ unsigned char* of_block(unsigned char* shared) { return shared; }

// The address, among those of the cluster, of what stands at `address` in the shared memory of
// block `rank`. As seen on an H200, bits 24 and up are the rank, in a block's own addresses too, so
// that these have more bits than a matrix descriptor. PTX ISA: mapa.
__device__ __forceinline__ u32 shared_of_rank(u32 address, u32 rank) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Waits until all threads of the cluster have arrived, with release and acquire semantics. PTX ISA:
// barrier.cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

// mbarrier_arrive_if() at an address of the cluster. Orders no accesses of this thread before those
// of other blocks (ptxas would wait for all of them: MEMBAR.GPU): only for barriers that say that a
// matmul has read what another block then overwrites. PTX ISA: mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive_in_cluster_if(bool condition, u32 barrier) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0;"
                 " @p mbarrier.arrive.shared::cluster.b64 _, [%0]; }"
                 :: "r"(barrier), "r"(static_cast<u32>(condition)) : "memory");
}

// Starts the copy of `bytes` contiguous bytes of the block's shared memory to another block's; on
// completion, the tx-count of `barrier`, there too, decreases by `bytes`. All are multiples of 16.
// Where other threads wrote the source, they execute fence_async_proxy() before the barrier that
// precedes. PTX ISA: cp.async.bulk.
__device__ __forceinline__ void copy_to_block(u32 target, u32 source, u32 barrier, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %3, [%2];"
                 :: "r"(target), "r"(source), "r"(barrier), "r"(bytes) : "memory");
}

// The same if `condition`, by a predicate.
__device__ __forceinline__ void copy_to_block_if(
    bool condition, u32 target, u32 source, u32 barrier, int bytes) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0;"
                 " @p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %3, [%2]; }"
                 :: "r"(target), "r"(source), "r"(barrier), "r"(bytes),
                    "r"(static_cast<u32>(condition)) : "memory");
}

// tma_load() to the same addresses of all blocks of the cluster whose bits of `blocks` are set,
// and their barriers. PTX ISA: cp.async.bulk.tensor, multicast.
__device__ __forceinline__ void tma_load_multicast(
    u32 target, const TensorMap& map, u32 barrier, u32 blocks, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 :: "r"(target), "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3),
                    "h"(static_cast<u16>(blocks)) : "memory");
}

// ---- Named barriers: for a subset of the block's threads ----
//
// `id` is 1 to 15; 0 is __syncthreads(). `threads` is a multiple of 32 and the same in every call
// until the barrier completes. Whole warps call.

// Waits until `threads` threads have arrived at barrier `id`, by barrier_sync or barrier_arrive.
// PTX ISA: bar.sync.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// Arrives at barrier `id` without waiting. PTX ISA: bar.arrive.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// ---- Registers ----

// Raise or lower the warpgroup's registers a thread to COUNT, a multiple of 8 from 24 to 256. All
// warps of the warpgroup execute it; alloc waits until the block has enough released registers. PTX
// ISA: setmaxnreg.
template <int COUNT> __device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// ---- Bulk copies (TMA): one thread starts each ----

// Orders this thread's earlier accesses to shared memory before later ones by the async proxy: bulk
// copies and wgmma. Where other threads wrote the data, they execute it before the barrier that
// precedes the copy or wgmma. PTX ISA: fence.proxy.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory. PTX ISA: fence.proxy.
__device__ __forceinline__ void fence_async_proxy_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Starts the copy of a box of a 4-D tensor to shared memory. On completion, the tx-count of
// `barrier` decreases by the bytes of the whole box: elements outside the tensor are filled with
// zeros and count too. The swizzle is that of the map. PTX ISA: cp.async.bulk.tensor.
__device__ __forceinline__ void tma_load(
    u32 target, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(target), "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

// Starts the copy of a box from shared memory to a 4-D tensor; elements outside the tensor are not
// written. The caller executes fence_async_proxy() before, tma_store_commit() after. PTX ISA:
// cp.async.bulk.tensor.
__device__ __forceinline__ void tma_store(
    const TensorMap& map, u32 source, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"
                 " [%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(&map), "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// Starts the copy of `bytes` contiguous bytes to shared memory; on completion, the tx-count of
// `barrier` decreases by `bytes`. Addresses and `bytes` are multiples of 16. PTX ISA:
// cp.async.bulk.
__device__ __forceinline__ void bulk_load(
    u32 target, const void* source, u32 barrier, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %3, [%2];"
                 :: "r"(target), "l"(source), "r"(barrier), "r"(bytes) : "memory");
}

// Starts the addition of contiguous floats in shared memory to those from `target` on in global
// memory; each float is added atomically. Addresses and `bytes` are multiples of 16. Belongs to a
// bulk group, as tma_store() does. PTX ISA: cp.reduce.async.bulk.
__device__ __forceinline__ void bulk_reduce_add(float* target, u32 source, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :: "l"(target), "r"(source), "r"(bytes) : "memory");
}

// The same of integers, modulo 2^32. PTX ISA: cp.reduce.async.bulk.
__device__ __forceinline__ void bulk_reduce_add_s32(int* target, u32 source, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;"
                 :: "l"(target), "r"(source), "r"(bytes) : "memory");
}

// Starts the copy of `bytes` contiguous bytes of shared memory to `target` in global memory.
// Addresses, `bytes` and groups as of bulk_reduce_add(). PTX ISA: cp.async.bulk.
__device__ __forceinline__ void bulk_store(void* target, u32 source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(target), "r"(source), "r"(bytes) : "memory");
}

// Makes one bulk group of the stores and reductions that this thread started since its last commit.
// PTX ISA: cp.async.bulk.commit_group.
__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all of this thread's bulk groups but the PENDING most recent have read their source,
// which may then be overwritten. PTX ISA: cp.async.bulk.wait_group.
template <int PENDING> __device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}

// Waits until they have completed: their writes are visible to this thread.
template <int PENDING> __device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" :: "n"(PENDING) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements; addresses and registers as for ldmatrix_x4(). PTX
// ISA: stmatrix.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// ---- wgmma: MMAs of a warpgroup, four consecutive warps whose first index is a multiple of 4 ----
//
// All four warps execute each of these instructions.

// Orders register accesses of the warpgroup before the following wgmma. Required before the first
// wgmma, and whenever registers of D or A were accessed since. PTX ISA: wgmma.fence.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Makes one wgmma group of the MMAs issued since the last commit. PTX ISA: wgmma.commit_group.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all wgmma groups but the PENDING most recent. PTX ISA: wgmma.wait_group.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// Tells the compiler that d is read and written here. Used where an MMA may still be writing d,
// which the compiler cannot know: no access to d moves across.
template <int N> __device__ __forceinline__ void warpgroup_fence_operand(float (&d)[N]) {
    #pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}

// Operand names and constraints of the accumulators in an asm statement: "%0, %1, ..." and "+f".
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
              "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D40(i) D32(i), D8(i + 32)
#define D48(i) D32(i), D8(i + 32), D8(i + 40)
#define D56(i) D48(i), D8(i + 48)
#define D64(i) D32(i), D32(i + 32)
#define D72(i) D64(i), D8(i + 64)
#define D80(i) D72(i), D8(i + 72)
#define D88(i) D64(i), D8(i + 64), D8(i + 72), D8(i + 80)
#define D96(i) D64(i), D32(i + 64)
#define D128(i) D64(i), D64(i + 64)
#define NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES32 NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
                "%30, %31"
#define NAMES40 NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES48 NAMES40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES56 NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES64 NAMES56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES72 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES80 NAMES72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES88 NAMES80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES96 NAMES88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES128 NAMES96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, " \
                 "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, " \
                 "%121, %122, %123, %124, %125, %126, %127"

// Issues D = A B, or D += A B if `accumulate`: A 64 x 16 and B 16 x N elements, D 64 x N floats,
// N / 2 in each thread. Warp w of the warpgroup holds rows 16w to 16w + 15 of D as C fragments of
// mma_16x8x16, one for each 8 columns: d[4j .. 4j + 3] are columns 8j to 8j + 7. SIGN, 1 or -1,
// multiplies A.
//
// wgmma_shared: A and B in shared memory, by matrix descriptors (wgmma.cuh). A is K-major, or
// M-major if A_TRANSPOSED; B is K-major, or N-major if B_TRANSPOSED. wgmma_registers: A as A
// fragments of mma_16x8x16 in registers. The last argument only selects the element type.
// Asynchronous: the caller executes wgmma_fence() before, and only after the wait accesses d or A's
// registers or overwrites the tiles. PTX ISA: Asynchronous Warpgroup Level Matrix Instructions:
// wgmma.
template <int SIGN, bool A_TRANSPOSED, bool B_TRANSPOSED, int COUNT, typename Element>
__device__ __forceinline__ void wgmma_shared(
    float (&d)[COUNT], u64 a, u64 b, bool accumulate, Element);

template <int SIGN, bool B_TRANSPOSED, int COUNT, typename Element>
__device__ __forceinline__ void wgmma_registers(
    float (&d)[COUNT], const u32* a, u64 b, bool accumulate, Element);

#define WGMMA(N, COUNT, ELEMENT, TYPE, A0, A1, A2, A3, A4, A5, A6, A7)                             \
    template <int SIGN, bool A_TRANSPOSED, bool B_TRANSPOSED>                                      \
    __device__ __forceinline__ void wgmma_shared(                                                  \
        float (&d)[COUNT], u64 a, u64 b, bool accumulate, ELEMENT) {                               \
        asm volatile(                                                                              \
            "{ .reg .pred p; setp.ne.b32 p, " A2 ", 0;"                                            \
            " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                       \
            " {" NAMES##COUNT "}, " A0 ", " A1 ", p, " A3 ", 1, " A4 ", " A5 "; }"                 \
            : D##COUNT(0) : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)), "n"(SIGN),          \
              "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));                                               \
    }                                                                                              \
    template <int SIGN, bool B_TRANSPOSED>                                                         \
    __device__ __forceinline__ void wgmma_registers(                                               \
        float (&d)[COUNT], const u32* a, u64 b, bool accumulate, ELEMENT) {                        \
        asm volatile(                                                                              \
            "{ .reg .pred p; setp.ne.b32 p, " A5 ", 0;"                                            \
            " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                       \
            " {" NAMES##COUNT "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", p, " A6 ", 1, " A7     \
            "; }"                                                                                  \
            : D##COUNT(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                    \
              "r"(static_cast<u32>(accumulate)), "n"(SIGN), "n"(B_TRANSPOSED));                    \
    }
#define WGMMA_OF_BOTH(N, COUNT, ...)                                                               \
    WGMMA(N, COUNT, float16, "f16", __VA_ARGS__)                                                   \
    WGMMA(N, COUNT, bfloat16, "bf16", __VA_ARGS__)

WGMMA_OF_BOTH(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23")
WGMMA_OF_BOTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")
WGMMA_OF_BOTH(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47")
WGMMA_OF_BOTH(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55")
WGMMA_OF_BOTH(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63")
WGMMA_OF_BOTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")
WGMMA_OF_BOTH(144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78", "%79")
WGMMA_OF_BOTH(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86", "%87")
WGMMA_OF_BOTH(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94", "%95")
WGMMA_OF_BOTH(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103")
WGMMA_OF_BOTH(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135")
