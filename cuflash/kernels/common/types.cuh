// Element types, and helpers for the arguments that a kernel gets from the host.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// 16-bit floating-point numbers as stored in memory. ptx.cuh converts them to float and back.
struct alignas(2) float16 { u16 bits; };
struct alignas(2) bfloat16 { u16 bits; };

// The type in which scores, sums and lse of an Element are held.
template <typename Element> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <typename Element> using Accumulator = typename AccumulatorOf<Element>::type;

// The argument structs, generated from cuflash/launch/structs.py; not a file of this folder.
#include "common/arguments.cuh"

// The arrays of a direction, which all its structs have.
inline const ForwardArguments& arrays_of(const ForwardArguments& arguments) { return arguments; }
inline const BackwardArguments& arrays_of(const BackwardArguments& arguments) { return arguments; }
inline const ReadoutArguments& arrays_of(const ReadoutArguments& arguments) { return arguments; }
template <class Arguments> inline const auto& arrays_of(const Arguments& arguments) {
    return arguments.arrays;
}

// Zeroes the counter of the dynamic scheduler, which sm90/forward.cu has.
template <class Arguments> inline void clear_tile_counter(const Arguments&) {}
inline void clear_tile_counter(const ForwardWgmmaOptionsArguments& args) { *args.tile_counter = 0; }
inline void clear_tile_counter(const ForwardWgmmaExpressionArguments& args) {
    if (args.tile_counter != nullptr) *args.tile_counter = 0;
}

// A compile-time bool as a function argument: `if constexpr (masked.value)`.
template <bool VALUE> struct Bool { static constexpr bool value = VALUE; };

// View a variable as a one-element array.
template <class T> __device__ __forceinline__ T (&one(T& x))[1] {
    return reinterpret_cast<T (&)[1]>(x);
}
