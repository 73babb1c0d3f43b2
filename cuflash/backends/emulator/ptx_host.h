// The emulator's twin of ptx.cuh: the same functions in C++; ptx.cuh describes the instructions.
// What a warp's lanes do together is the engine's (engine.h).
#pragma once
#include "common/types.cuh"

// ---- Conversions ----

inline float to_float(float16 x) { return emulator::value_of_16_bits(x.bits, false); }

inline float to_float(bfloat16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

template <typename Element> u32 pack(float low, float high);

template <> EMULATOR_CALLED u32 pack<float16>(float low, float high) {
    return emulator::float16_bits(low) | emulator::float16_bits(high) << 16;
}

template <> EMULATOR_CALLED u32 pack<bfloat16>(float low, float high) {
    return emulator::bfloat16_bits(low) | emulator::bfloat16_bits(high) << 16;
}

template <typename Element> inline Element low_half(u32 pair) {
    return {static_cast<u16>(pair)};
}

template <typename Element> inline Element high_half(u32 pair) {
    return {static_cast<u16>(pair >> 16)};
}

// ---- Arithmetic ----

EMULATOR_CALLED float exp2_approx(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;                        // flushed; NaN stays
}

EMULATOR_CALLED float reciprocal_approx(float x) {
    const auto flushed = [](float a) { return fabsf(a) < 0x1p-126f ? copysignf(0.0f, a) : a; };
    return flushed(1.0f / flushed(x));
}

// As NVIDIA GPUs do it: by the inverse of a b whose inverse is normal, so that a / a may differ
// from 1.
EMULATOR_CALLED float divide_approx(float a, float b) {
    const float size = fabsf(b);
    const float factor = size > 0x1p126f ? 0.25f : size < 0x1p-126f ? 0x1p24f : 1.0f;
    return a * factor * (1.0f / (b * factor));
}

EMULATOR_CALLED u32 multiply_float16_pairs(u32 a, u32 b) {
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

EMULATOR_CALLED u32 max_of_upper_halves(u32 m, float a, float b) {
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

inline void mma_16x8x16(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float16, EMULATOR_SITE) {
    constexpr bool HALVES = __CUDA_ARCH__ < 800;
    emulator::mma_16x8x16(d, a, b0, b1, false, HALVES, {file, line});
}

inline void mma_16x8x16(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bfloat16, EMULATOR_SITE) {
    constexpr bool HALVES = __CUDA_ARCH__ < 800;
    emulator::mma_16x8x16(d, a, b0, b1, true, HALVES, {file, line});
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
            double& d = static_cast<const DoubleOperands*>(lanes[lane])->d[i];
            double sum = d;
            for (int k = 0; k < 8; ++k) sum = fma(a[row][k], b[k][column], sum);
            d = sum;
        }
}

}  // namespace emulator

inline void mma_16x8x8(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE) {
    emulator::mma_16x8x8_tf32(d, a, b0, b1, {file, line});
}

inline void mma_16x8x8(
    double (&d)[4], const double (&a)[4], double b0, double b1, EMULATOR_SITE) {
    emulator::DoubleOperands own{d, a, {b0, b1}};
    emulator::meet("mma.sync", emulator::WHOLE_WARP, &own, emulator::mma_16x8x8, {file, line});
}

// ---- Shared memory ----

inline u32 shared_address(const void* pointer) {
    const auto offset = static_cast<const unsigned char*>(pointer) - shared_bytes;
    return emulator::blocks_of_cluster > 1 ? emulator::address_in_cluster(offset)
                                           : static_cast<u32>(offset);
}

// ---- Clusters ----

inline u32 cluster_rank() { return static_cast<u32>(emulator::rank_in_cluster()); }

EMULATOR_CALLED unsigned char* of_block(unsigned char* shared) {
    return shared + emulator::first_byte_of_block();
}

inline u32 shared_of_rank(u32 address, u32 rank) {
    return emulator::shared_of_rank(address, static_cast<int>(rank));
}

inline void mbarrier_arrive_in_cluster_if(bool condition, u32 barrier, EMULATOR_SITE) {
    if (condition) emulator::mbarrier_arrive(barrier, 0, {file, line});
}

inline void copy_to_block(u32 target, u32 source, u32 barrier, int bytes, EMULATOR_SITE) {
    emulator::copy_shared(target, source, barrier, bytes, {file, line});
}

inline void copy_to_block_if(
    bool condition, u32 target, u32 source, u32 barrier, int bytes, EMULATOR_SITE) {
    if (condition) emulator::copy_shared(target, source, barrier, bytes, {file, line});
}

EMULATOR_CALLED void tma_load_multicast(
    u32 target, const TensorMap& map, u32 barrier, u32 blocks, int x0, int x1, int x2, int x3,
    EMULATOR_SITE) {
    emulator::load_box_of_blocks(target, &map, barrier, blocks, {x0, x1, x2, x3}, {file, line});
}

inline void cluster_sync(EMULATOR_SITE) {
    emulator::wait_for_all("barrier.cluster", false, {file, line});
}

inline u32 opaque(u32 x) { return x; }
inline float* opaque(float* x) { return x; }

inline void ldmatrix_x4(u32 (&r)[4], u32 address, EMULATOR_SITE) {
    emulator::ldmatrix(r, address, false, {file, line});
}

inline void ldmatrix_x4_transposed(u32 (&r)[4], u32 address, EMULATOR_SITE) {
    emulator::ldmatrix(r, address, true, {file, line});
}

inline u32 movmatrix_transposed(u32 pair, EMULATOR_SITE) {
    return emulator::movmatrix(pair, {file, line});
}

constexpr bool HAS_REDUX = __CUDA_ARCH__ >= 800;

EMULATOR_CALLED int redux_min(int x, EMULATOR_SITE) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const int other =
            __shfl_xor_sync(emulator::WHOLE_WARP, x, distance, file, line);
        x = other < x ? other : x;
    }
    return x;
}
inline int redux_max(int x, EMULATOR_SITE) { return ~redux_min(~x, file, line); }

EMULATOR_CALLED void store_shared(u32 address, u32 word, EMULATOR_SITE) {
    *static_cast<u32*>(
        emulator::shared_memory(address, 4, 4, emulator::Access::WRITE, {file, line})) = word;
}

EMULATOR_CALLED void store_shared(u32 address, u16 x, EMULATOR_SITE) {
    *static_cast<u16*>(
        emulator::shared_memory(address, 2, 2, emulator::Access::WRITE, {file, line})) = x;
}

EMULATOR_CALLED void store_shared_16(
    u32 address, float x, float y, float z, float w, EMULATOR_SITE) {
    *static_cast<float4*>(
        emulator::shared_memory(address, 16, 16, emulator::Access::WRITE, {file, line})) = {
        x, y, z, w};
}

EMULATOR_CALLED uint4 load_shared_16(u32 address, EMULATOR_SITE) {
    return *static_cast<const uint4*>(
        emulator::shared_memory(address, 16, 16, emulator::Access::READ, {file, line}));
}

EMULATOR_CALLED float load_shared_float(u32 address, EMULATOR_SITE) {
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

EMULATOR_CALLED void reduce_add_s32(int* target, int x, EMULATOR_SITE) {
    emulator::check_global(target, 4, 4, emulator::Access::WRITE, {file, line});
    *target = static_cast<int>(static_cast<u32>(*target) + static_cast<u32>(x));
}

EMULATOR_CALLED void reduce_add_nonzero(float* target, float x, EMULATOR_SITE) {
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
// Functions for which the engine records a return address are forced inline, so that it is in the
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

inline void mbarrier_arrive_expect_if(
    bool condition, u32 barrier, int bytes, EMULATOR_SITE) {
    if (condition) emulator::mbarrier_arrive(barrier, bytes, {file, line});
}

inline bool mbarrier_try_wait(u32 barrier, u32 parity, EMULATOR_SITE) {
    return emulator::mbarrier_try_wait(barrier, parity, {file, line});
}

EMULATOR_INLINED void barrier_sync(int id, int threads, EMULATOR_SITE) {
    emulator::named_barrier(id, threads, true, {file, line});
}

EMULATOR_INLINED void barrier_arrive(int id, int threads, EMULATOR_SITE) {
    emulator::named_barrier(id, threads, false, {file, line});
}

template <int COUNT> EMULATOR_INLINED void warpgroup_reg_alloc(EMULATOR_SITE) {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg takes no other");
    emulator::set_registers(COUNT, true, {file, line});
}

template <int COUNT> EMULATOR_INLINED void warpgroup_reg_dealloc(EMULATOR_SITE) {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg takes no other");
    emulator::set_registers(COUNT, false, {file, line});
}

// Kernels run one after the other.
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

inline void fence_async_proxy() { emulator::fence_async_proxy(); }
inline void fence_async_proxy_global() {}                   // not checked

EMULATOR_CALLED void tma_load(
    u32 target, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3,
    EMULATOR_SITE) {
    emulator::load_box(target, &map, barrier, {x0, x1, x2, x3}, {file, line});
}

EMULATOR_INLINED void tma_store(
    const TensorMap& map, u32 source, int x0, int x1, int x2, int x3, EMULATOR_SITE) {
    emulator::store_box(&map, source, {x0, x1, x2, x3}, {file, line});
}

inline void bulk_load(u32 target, const void* source, u32 barrier, int bytes, EMULATOR_SITE) {
    emulator::load_bytes(target, source, barrier, bytes, {file, line});
}

EMULATOR_INLINED void bulk_reduce_add(
    float* target, u32 source, int bytes, EMULATOR_SITE) {
    emulator::add_floats(target, source, bytes, {file, line});
}

EMULATOR_INLINED void bulk_reduce_add_s32(
    int* target, u32 source, int bytes, EMULATOR_SITE) {
    emulator::add_ints(target, source, bytes, {file, line});
}

__device__ __forceinline__ void bulk_store(
    void* target, u32 source, int bytes, EMULATOR_SITE) {
    emulator::store_bytes(target, source, bytes, {file, line});
}

inline void tma_store_commit() { emulator::commit_stores(); }

template <int PENDING> inline void tma_store_wait_read() { emulator::read_stores(PENDING); }
template <int PENDING> inline void tma_store_wait() { emulator::write_stores(PENDING); }

EMULATOR_CALLED void stmatrix_x4(
    u32 address, u32 r0, u32 r1, u32 r2, u32 r3, EMULATOR_SITE) {
    emulator::stmatrix(address, {r0, r1, r2, r3}, {file, line});
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
EMULATOR_INLINED void wgmma_shared(
    float (&d)[COUNT], u64 a, u64 b, bool accumulate, Element, EMULATOR_SITE) {
    emulator::WgmmaOperands own{d, COUNT, a, b, nullptr, accumulate, A_TRANSPOSED, B_TRANSPOSED,
                                  SIGN, emulator::bits_to_float<Element>};
    emulator::start_wgmma(own, {file, line});
}

template <int SIGN, bool B_TRANSPOSED, int COUNT, class Element>
EMULATOR_INLINED void wgmma_registers(
    float (&d)[COUNT], const u32* a, u64 b, bool accumulate, Element, EMULATOR_SITE) {
    emulator::WgmmaOperands own{d, COUNT, 0, b, a, accumulate, false, B_TRANSPOSED, SIGN,
                                  emulator::bits_to_float<Element>};
    emulator::start_wgmma(own, {file, line});
}
