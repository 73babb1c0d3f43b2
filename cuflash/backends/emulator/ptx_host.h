// The emulator's twin of ptx.cuh: the same functions in C++; ptx.cuh describes the instructions.
// Warp-wide functions call meet first (engine.h).
#pragma once
#include "common/types.cuh"

// ---- Conversions ----

inline float to_float(float16 x) {
    const u32 sign = static_cast<u32>(x.bits & 0x8000) << 16;
    const u32 exponent = x.bits >> 10 & 31, fraction = x.bits & 0x3FF;
    if (exponent == 31)                                     // NaN or infinite
        return __uint_as_float(sign | 0x7F800000u | fraction << 13);
    if (exponent == 0) {                                    // zero or denormal: fraction 2^-24
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return __uint_as_float(sign | __float_as_uint(magnitude));
    }
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

inline float to_float(bfloat16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

template <typename Element> u32 pack(float low, float high);

namespace emulator {

// x / 2^bits, rounded to nearest even.
inline u32 shift_rounded(u32 x, int bits) {
    if (bits > 31) return 0;
    const u32 half = 1u << (bits - 1), kept = x >> bits, rest = x & ((1u << bits) - 1);
    return kept + (rest > half || (rest == half && kept % 2 == 1));
}

inline u32 float16_bits(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000u) return 0x7FFF;             // NaN
    if (magnitude >= 0x47800000u) return sign | 0x7C00;     // 2^16 and more
    if (magnitude >= 0x38800000u)                           // normal: rebias, round the fraction
        return sign | (shift_rounded(magnitude, 13) - (112 << 10));
    const u32 fraction = (magnitude & 0x7FFFFF) | (magnitude >> 23 ? 0x800000 : 0);
    return sign | shift_rounded(fraction, 126 - static_cast<int>(magnitude >> 23));
}

inline u32 bfloat16_bits(float x) {
    const u32 bits = __float_as_uint(x);
    return (bits & 0x7FFFFFFF) > 0x7F800000u ? 0x7FFF : shift_rounded(bits, 16);
}

}  // namespace emulator

template <> inline u32 pack<float16>(float low, float high) {
    return emulator::float16_bits(low) | emulator::float16_bits(high) << 16;
}

template <> inline u32 pack<bfloat16>(float low, float high) {
    return emulator::bfloat16_bits(low) | emulator::bfloat16_bits(high) << 16;
}

template <typename Element> inline Element low_half(u32 pair) {
    return {static_cast<u16>(pair)};
}

template <typename Element> inline Element high_half(u32 pair) {
    return {static_cast<u16>(pair >> 16)};
}

// ---- Arithmetic ----

inline float exp2_approx(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;                        // flushed; NaN stays
}

inline float reciprocal_approx(float x) {
    const auto flushed = [](float a) { return fabsf(a) < 0x1p-126f ? copysignf(0.0f, a) : a; };
    return flushed(1.0f / flushed(x));
}

inline u32 multiply_float16_pairs(u32 a, u32 b) {
    const auto product = [&](auto half) {
        return to_float(half(a)) * to_float(half(b));
    };
    return pack<float16>(product(low_half<float16>), product(high_half<float16>));
}

constexpr bool CONVERTS_FLOAT8 = true;

inline void e4m3_to_float16(u32 (&pairs)[2], u32 word) {
    const auto number = [&](int i) {
        const int byte = word >> (i * 8) & 0xFF, exponent = byte >> 3 & 0xF, mantissa = byte & 7;
        const float size =
            (byte & 0x7F) == 0x7F ? __int_as_float(0x7FC00000)
            : exponent == 0       ? static_cast<float>(mantissa) * 0x1p-9f
                                  : __int_as_float((exponent + 120) << 23 | mantissa << 20);
        return copysignf(size, byte & 0x80 ? -1.0f : 1.0f);
    };
    for (int i = 0; i < 2; ++i) pairs[i] = pack<float16>(number(i * 2), number(i * 2 + 1));
}

inline u32 max_of_upper_halves(u32 m, float a, float b) {
    const auto order = [](u32 bits) {                       // of float16 numbers, NaN above all
        const int size = static_cast<int>(bits >> 16 & 0x7FFF);
        return size > 0x7C00 ? 0x7FFF : (bits >> 31) != 0 ? -size : size;
    };
    u32 largest = m;
    const u32 others[] = {__float_as_uint(a), __float_as_uint(b)};
    for (const u32 bits : others)
        if (order(bits) > order(largest)) largest = bits;
    return order(largest) == 0x7FFF ? 0x7FFF0000u : largest & 0xFFFF0000u;
}

inline u32 max_of_upper_halves_of_sizes(u32 m, float a, float b) {
    return max_of_upper_halves(m, fabsf(a), fabsf(b));
}

namespace emulator {

struct MmaOperands { float* d; const u32* a; u32 b[2]; };

// Below sm_80 an MMA of 16 products is two of 8, the first 8 first.
constexpr bool HALVES_OF_MMAS = __CUDA_ARCH__ < 800;

inline void multiply_add_half(
    float (&d)[16][8], const float (&a)[16][16], const float (&b)[16][8], int half) {
    float columns[16][16] = {}, rows[16][8] = {};           // eight more products of 0
    for (int k = half * 8; k < half * 8 + 8; ++k) {
        for (int i = 0; i < 16; ++i) columns[i][k] = a[i][k];
        for (int j = 0; j < 8; ++j) rows[k][j] = b[k][j];
    }
    multiply_add(d, columns, rows);
}

template <typename Element> void mma_16x8x16(void* const (&lanes)[32]) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaOperands& own = *static_cast<const MmaOperands*>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            const int row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
            a[row][column] = to_float(low_half<Element>(own.a[i]));
            a[row][column + 1] = to_float(high_half<Element>(own.a[i]));
            d[g + i / 2 * 8][2 * t + i % 2] = own.d[i];
        }
        for (int i = 0; i < 2; ++i) {
            b[2 * t + i * 8][g] = to_float(low_half<Element>(own.b[i]));
            b[2 * t + i * 8 + 1][g] = to_float(high_half<Element>(own.b[i]));
        }
    }
    if constexpr (HALVES_OF_MMAS)
        for (int half = 0; half < 2; ++half) multiply_add_half(d, a, b, half);
    else
        multiply_add(d, a, b);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i)
            static_cast<const MmaOperands*>(lanes[lane])->d[i] =
                d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

}  // namespace emulator

template <typename Element>
inline void mma_16x8x16(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Element, EMULATOR_SITE) {
    emulator::MmaOperands own{d, a, {b0, b1}};
    emulator::meet("mma.sync", emulator::WHOLE_WARP, &own, emulator::mma_16x8x16<Element>,
                   {file, line});
}

namespace emulator {

struct DoubleOperands { double* d; const double* a; double b[2]; };

inline void mma_16x8x8(void* const (&lanes)[32]) {
    double a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
        const DoubleOperands& own = *static_cast<const DoubleOperands*>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = own.a[i];
        for (int i = 0; i < 2; ++i) b[t + i * 4][g] = own.b[i];
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
            double& sum = static_cast<const DoubleOperands*>(lanes[lane])->d[i];
            for (int k = 0; k < 8; ++k) sum = fma(a[row][k], b[k][column], sum);
        }
}

inline float tf32(u32 bits) { return __uint_as_float(bits & 0xFFFFE000); }

inline void mma_16x8x8_tf32(void* const (&lanes)[32]) {
    float a[16][16] = {}, b[16][8] = {}, d[16][8];          // eight more products of 0
    for (int lane = 0; lane < 32; ++lane) {
        const MmaOperands& own = *static_cast<const MmaOperands*>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            a[g + i % 2 * 8][t + i / 2 * 4] = tf32(own.a[i]);
            d[g + i / 2 * 8][2 * t + i % 2] = own.d[i];
        }
        for (int i = 0; i < 2; ++i) b[t + i * 4][g] = tf32(own.b[i]);
    }
    multiply_add(d, a, b);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i)
            static_cast<const MmaOperands*>(lanes[lane])->d[i] =
                d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

}  // namespace emulator

inline void mma_16x8x8(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE) {
    emulator::MmaOperands own{d, a, {b0, b1}};
    emulator::meet("mma.sync", emulator::WHOLE_WARP, &own, emulator::mma_16x8x8_tf32,
                   {file, line});
}

inline void mma_16x8x8(
    double (&d)[4], const double (&a)[4], double b0, double b1, EMULATOR_SITE) {
    emulator::DoubleOperands own{d, a, {b0, b1}};
    emulator::meet("mma.sync", emulator::WHOLE_WARP, &own, emulator::mma_16x8x8, {file, line});
}

// ---- Shared memory ----

inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(static_cast<const unsigned char*>(pointer) - shared_bytes);
}

inline u32 opaque(u32 x) { return x; }
inline float* opaque(float* x) { return x; }

namespace emulator {

struct LdmatrixOperands { const u32* row; u32* r; };

// Of matrix i, lane l gets elements 2(l % 4) and 2(l % 4) + 1 of row l / 4; transposed: of column.
template <bool TRANSPOSED> void ldmatrix(void* const (&lanes)[32]) {
    const auto operands = [&](int lane) -> const LdmatrixOperands& {
        return *static_cast<const LdmatrixOperands*>(lanes[lane]);
    };
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < 32; ++lane) {
            const int line = lane / 4, pair = lane % 4;
            const auto element = [&](int row, int column) {
                return operands(i * 8 + row).row[column / 2] >> (column % 2 * 16) & 0xFFFF;
            };
            operands(lane).r[i] = TRANSPOSED
                ? element(2 * pair, line) | element(2 * pair + 1, line) << 16
                : element(line, 2 * pair) | element(line, 2 * pair + 1) << 16;
        }
}

template <bool TRANSPOSED> inline void ldmatrix_of(u32 (&r)[4], u32 address, Site site) {
    const LdmatrixOperands own{
        static_cast<const u32*>(shared_memory(address, 16, 16, Access::READ_BY_WARP, site)), r};
    meet("ldmatrix", WHOLE_WARP, const_cast<LdmatrixOperands*>(&own), ldmatrix<TRANSPOSED>, site);
}

}  // namespace emulator

inline void ldmatrix_x4(u32 (&r)[4], u32 address, EMULATOR_SITE) {
    emulator::ldmatrix_of<false>(r, address, {file, line});
}

inline void ldmatrix_x4_transposed(u32 (&r)[4], u32 address, EMULATOR_SITE) {
    emulator::ldmatrix_of<true>(r, address, {file, line});
}

namespace emulator {

struct MovmatrixOperands { u32 pair, transposed; };

inline void movmatrix(void* const (&lanes)[32]) {
    const auto element = [&](int row, int column) {
        const u32 pair = static_cast<const MovmatrixOperands*>(lanes[row * 4 + column / 2])->pair;
        return pair >> (column % 2 * 16) & 0xFFFF;
    };
    for (int lane = 0; lane < 32; ++lane)
        static_cast<MovmatrixOperands*>(lanes[lane])->transposed =
            element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
}

}  // namespace emulator

inline u32 movmatrix_transposed(u32 pair, EMULATOR_SITE) {
    emulator::MovmatrixOperands own{pair, 0};
    emulator::meet("movmatrix", emulator::WHOLE_WARP, &own, emulator::movmatrix, {file, line});
    return own.transposed;
}

constexpr bool HAS_REDUX = __CUDA_ARCH__ >= 800;

inline int redux_min(int x, EMULATOR_SITE) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const int other =
            __shfl_xor_sync(emulator::WHOLE_WARP, x, distance, file, line);
        x = other < x ? other : x;
    }
    return x;
}
inline int redux_max(int x, EMULATOR_SITE) { return ~redux_min(~x, file, line); }

inline void store_shared(u32 address, u32 word, EMULATOR_SITE) {
    *static_cast<u32*>(
        emulator::shared_memory(address, 4, 4, emulator::Access::WRITE, {file, line})) = word;
}

inline void store_shared(u32 address, u16 x, EMULATOR_SITE) {
    *static_cast<u16*>(
        emulator::shared_memory(address, 2, 2, emulator::Access::WRITE, {file, line})) = x;
}

inline void store_shared_16(u32 address, float x, float y, float z, float w, EMULATOR_SITE) {
    *static_cast<float4*>(
        emulator::shared_memory(address, 16, 16, emulator::Access::WRITE, {file, line})) = {
        x, y, z, w};
}

inline uint4 load_shared_16(u32 address, EMULATOR_SITE) {
    return *static_cast<const uint4*>(
        emulator::shared_memory(address, 16, 16, emulator::Access::READ, {file, line}));
}

inline float load_shared_float(u32 address, EMULATOR_SITE) {
    return *static_cast<const float*>(
        emulator::shared_memory(address, 4, 4, emulator::Access::READ, {file, line}));
}

inline void load_shared_floats(u32 address, float& x, float& y, EMULATOR_SITE) {
    const auto* pair = static_cast<const float*>(
        emulator::shared_memory(address, 8, 8, emulator::Access::READ, {file, line}));
    x = pair[0];
    y = pair[1];
}

// ---- Asynchronous copies, global to shared ----

constexpr bool COPIES_AT_ONCE = __CUDA_ARCH__ < 800;

namespace emulator {

inline void copy_chunk(u32 target, const void* source, int bytes, int read, Site site) {
    if constexpr (COPIES_AT_ONCE) copy_now(target, source, bytes, read, site);
    else copy_later(target, source, bytes, read, site);
}

}  // namespace emulator

inline void cp_async_16(u32 target, const void* source, EMULATOR_SITE) {
    emulator::copy_chunk(target, source, 16, 16, {file, line});
}

inline void cp_async_16_partly(u32 target, const void* source, int bytes, EMULATOR_SITE) {
    emulator::copy_chunk(target, source, 16, bytes, {file, line});
}

inline void cp_async_4(u32 target, const void* source, int bytes, EMULATOR_SITE) {
    emulator::copy_chunk(target, source, 4, bytes, {file, line});
}

inline void cp_async_commit() {
    if constexpr (!COPIES_AT_ONCE) emulator::commit_copies();
}

template <int PENDING> inline void cp_async_wait() {
    if constexpr (!COPIES_AT_ONCE) emulator::wait_for_copies(PENDING);
}

// ---- Global memory ----

inline void reduce_add_4(float* target, const float (&x)[4], EMULATOR_SITE) {
    emulator::check_global(target, 16, 16, emulator::Access::WRITE, {file, line});
    for (int i = 0; i < 4; ++i) target[i] += x[i];
}

inline void reduce_add_s32(int* target, int x, EMULATOR_SITE) {
    emulator::check_global(target, 4, 4, emulator::Access::WRITE, {file, line});
    *target = static_cast<int>(static_cast<u32>(*target) + static_cast<u32>(x));
}

inline void reduce_add_nonzero(float* target, float x, EMULATOR_SITE) {
    if (x == 0.0f) return;
    emulator::check_global(target, 4, 4, emulator::Access::WRITE, {file, line});
    *target += x;
}

inline int load_acquire(const int* source, EMULATOR_SITE) {
    emulator::give_way(source, {file, line});
    return *source;
}

inline void store_release(int* target, int x, EMULATOR_SITE) {
    emulator::check_global(target, 4, 4, emulator::Access::WRITE, {file, line});
    *target = x;
    emulator::progress();
}

// ======== Hopper (sm_90a) ========
//
// These functions are forced inline, so that the return address that the engine records is in the
// kernel and not in this file.

inline void mbarrier_init(u32 barrier, int arrivals, EMULATOR_SITE) {
    emulator::mbarrier_init(barrier, arrivals, {file, line});
}

inline void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }

inline void mbarrier_arrive(u32 barrier, EMULATOR_SITE) {
    emulator::mbarrier_arrive(barrier, 0, {file, line});
}

inline void mbarrier_arrive_if(bool condition, u32 barrier, EMULATOR_SITE) {
    if (condition) emulator::mbarrier_arrive(barrier, 0, {file, line});
}

// The copies are made now. That the waiting thread calls fence_async_proxy() is not checked.
inline void cp_async_mbarrier_arrive(u32 barrier, EMULATOR_SITE) {
    emulator::commit_copies();
    emulator::wait_for_copies(0);
    emulator::fence_async_proxy();
    emulator::mbarrier_arrive(barrier, 0, {file, line});
}

inline void mbarrier_arrive_expect(u32 barrier, int bytes, EMULATOR_SITE) {
    emulator::mbarrier_arrive(barrier, bytes, {file, line});
}

inline bool mbarrier_try_wait(u32 barrier, u32 parity, EMULATOR_SITE) {
    return emulator::mbarrier_try_wait(barrier, parity, {file, line});
}

__device__ __forceinline__ void barrier_sync(int id, int threads, EMULATOR_SITE) {
    emulator::named_barrier(id, threads, true, {file, line});
}

__device__ __forceinline__ void barrier_arrive(int id, int threads, EMULATOR_SITE) {
    emulator::named_barrier(id, threads, false, {file, line});
}

template <int COUNT> __device__ __forceinline__ void warpgroup_reg_alloc(EMULATOR_SITE) {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg takes no other");
    emulator::set_registers(COUNT, true, {file, line});
}

template <int COUNT> __device__ __forceinline__ void warpgroup_reg_dealloc(EMULATOR_SITE) {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg takes no other");
    emulator::set_registers(COUNT, false, {file, line});
}

// Kernels run one after the other.
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

inline void fence_async_proxy() { emulator::fence_async_proxy(); }

inline void tma_load(u32 target, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3,
                     EMULATOR_SITE) {
    emulator::load_box(target, &map, barrier, {x0, x1, x2, x3}, {file, line});
}

__device__ __forceinline__ void tma_store(
    const TensorMap& map, u32 source, int x0, int x1, int x2, int x3, EMULATOR_SITE) {
    emulator::store_box(&map, source, {x0, x1, x2, x3}, {file, line});
}

inline void bulk_load(u32 target, const void* source, u32 barrier, int bytes, EMULATOR_SITE) {
    emulator::load_bytes(target, source, barrier, bytes, {file, line});
}

__device__ __forceinline__ void bulk_reduce_add(
    float* target, u32 source, int bytes, EMULATOR_SITE) {
    emulator::add_floats(target, source, bytes, {file, line});
}

__device__ __forceinline__ void bulk_reduce_add_s32(
    int* target, u32 source, int bytes, EMULATOR_SITE) {
    emulator::add_ints(target, source, bytes, {file, line});
}

inline void tma_store_commit() { emulator::commit_stores(); }

template <int PENDING> inline void tma_store_wait_read() { emulator::read_stores(PENDING); }
template <int PENDING> inline void tma_store_wait() { emulator::write_stores(PENDING); }

// Lane l gives the address of row l % 8 of matrix l / 8: its own 16 bytes are checked as its own.
namespace emulator {

struct StmatrixOperands { u32* row; u32 r[4]; };

inline void stmatrix(void* const (&lanes)[32]) {
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < 32; ++lane) {
            const auto& target = *static_cast<const StmatrixOperands*>(lanes[i * 8 + lane / 4]);
            target.row[lane % 4] = static_cast<const StmatrixOperands*>(lanes[lane])->r[i];
        }
}

}  // namespace emulator

inline void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3, EMULATOR_SITE) {
    emulator::StmatrixOperands own{
        static_cast<u32*>(emulator::shared_memory(
            address, 16, 16, emulator::Access::WRITE, {file, line})), {r0, r1, r2, r3}};
    emulator::meet("stmatrix", emulator::WHOLE_WARP, &own, emulator::stmatrix, {file, line});
}

inline void wgmma_fence(EMULATOR_SITE) { emulator::fence_wgmmas({file, line}); }

inline void wgmma_commit(EMULATOR_SITE) { emulator::commit_wgmmas({file, line}); }

template <int PENDING> inline void wgmma_wait(EMULATOR_SITE) {
    emulator::wait_for_wgmmas(PENDING, {file, line});
}

template <int N> inline void warpgroup_fence_operand(float (&)[N]) {}

namespace emulator {

template <class Element> float bits_to_float(uint16_t bits) { return to_float(Element{bits}); }

}  // namespace emulator

template <int SIGN, bool A_TRANSPOSED, bool B_TRANSPOSED, int COUNT, class Element>
__device__ __forceinline__ void wgmma_shared(
    float (&d)[COUNT], u64 a, u64 b, bool accumulate, Element, EMULATOR_SITE) {
    emulator::WgmmaOperands own{d, COUNT, a, b, nullptr, accumulate, A_TRANSPOSED, B_TRANSPOSED,
                                  SIGN, emulator::bits_to_float<Element>};
    emulator::start_wgmma(own, {file, line});
}

template <int COUNT, class Element>
__device__ __forceinline__ void wgmma_registers(
    float (&d)[COUNT], const u32* a, u64 b, bool accumulate, Element, EMULATOR_SITE) {
    emulator::WgmmaOperands own{
        d, COUNT, 0, b, a, accumulate, false, true, 1, emulator::bits_to_float<Element>};
    emulator::start_wgmma(own, {file, line});
}
