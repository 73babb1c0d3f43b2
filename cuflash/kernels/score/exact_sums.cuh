// Sums of reals that are exact, whatever their order: the gradients of a user's arrays in
// deterministic calls.
//
// A finite real is an integer times the smallest one above 0, 2^LOWEST. A sum is held as DIGITS
// numbers of 64 bits, with weights 2^(24 n + LOWEST); 24 bits each of an addend are added to a few
// of them. Up to 2^39 additions do not overflow. finish/array_gradients.cu rounds them.
// (J. Demmel, H. D. Nguyen, Parallel Reproducible Summation, IEEE Trans. Comput. 64, 2015, keep
// fewer digits, of which theirs depend on the largest addend. U. Kulisch keeps all.)
#pragma once
#include "common/elements.cuh"

namespace ex {

constexpr int MOST_ARRAYS = 8;                              // of a call
constexpr int DIGIT_BITS = 24;
constexpr u64 DIGIT = (u64{1} << DIGIT_BITS) - 1;

template <class Real> struct Format;
template <> struct Format<float> {
    static constexpr int MANTISSA_BITS = 23, DIGITS = 12, LOWEST = -149;
    static constexpr u32 LAST_EXPONENT = 255;
    static u64 bits(float x) { return __float_as_uint(x); }
};
template <> struct Format<double> {
    static constexpr int MANTISSA_BITS = 52, DIGITS = 88, LOWEST = -1074;
    static constexpr u32 LAST_EXPONENT = 2047;
    static u64 bits(double x) { return static_cast<u64>(__double_as_longlong(x)); }
};

// Sums of `count` elements; digit n of element i is words[n * count + i]. The last word counts
// infinities: by 1 those above 0, by 2^32 those below, by both a NaN.
template <class Real> struct ExactSums {
    using F = Format<Real>;
    static constexpr int WORDS = F::DIGITS + 1;
    u64* words;
    i64 count;

    template <class Arguments> static ExactSums of(const Arguments& args, int slot) {
        return {static_cast<u64*>(args.dmod_sums[slot]), elements_of(args, slot)};
    }
    // Of an array of mod_arrays. Its gradient is contiguous.
    template <class Arguments> static i64 elements_of(const Arguments& args, int slot) {
        return args.expression.dmod_strides[4 * slot] * args.expression.sizes[4 * slot];
    }

    void add(i64 element, Real x) const {
        const u64 bits = F::bits(x);
        const u32 exponent = static_cast<u32>(bits >> F::MANTISSA_BITS) & F::LAST_EXPONENT;
        const u64 fraction = bits & ((u64{1} << F::MANTISSA_BITS) - 1);
        const bool below = x < Real(0);
        u64* word = words + element;
        if (exponent == F::LAST_EXPONENT) {
            const u64 added = fraction != 0 ? (u64{1} << 32) + 1 : below ? u64{1} << 32 : u64{1};
            atomicAdd(word + F::DIGITS * count, added);
            return;
        }
        const u32 shift = exponent == 0 ? 0 : exponent - 1;
        const u32 first = shift / DIGIT_BITS, rest = shift % DIGIT_BITS;
        u64 left = exponent == 0 ? fraction : fraction | u64{1} << F::MANTISSA_BITS;
        u64 digit = (left << rest) & DIGIT;
        left >>= DIGIT_BITS - rest;
        word += first * count;
        #pragma unroll
        for (int n = 0; n < (F::MANTISSA_BITS + DIGIT_BITS) / DIGIT_BITS + 1; ++n) {
            if (digit != 0) atomicAdd(word, below ? ~digit + 1 : digit);
            digit = left & DIGIT;
            left >>= DIGIT_BITS;
            word += count;
        }
    }

    // The sum, rounded: its first four digits are, which have 73 bits or more.
    Real rounded(i64 element) const {
        const u64* word = words + element;
        const u64 infinities = word[F::DIGITS * count];
        if (infinities != 0) {
            const double infinity = __longlong_as_double(0x7FF0000000000000);
            const bool above = (infinities & 0xFFFFFFFFu) != 0, below = infinities >> 32 != 0;
            return static_cast<Real>((above ? infinity : 0.0) - (below ? infinity : 0.0));
        }
        i64 carry = 0;
        for (int n = 0; n < F::DIGITS; ++n) next_digit(word[n * count], carry);
        const bool negative = carry < 0;
        carry = 0;
        u64 last[4] = {}, found[4] = {};                    // the highest first
        int highest = 0;
        for (int n = 0; n <= F::DIGITS; ++n) {
            const u64 given = n < F::DIGITS ? word[n * count] : u64{0};
            #pragma unroll
            for (int k = 3; k > 0; --k) last[k] = last[k - 1];
            last[0] = next_digit(negative ? ~given + 1 : given, carry);
            if (last[0] == 0) continue;
            highest = n;
            #pragma unroll
            for (int k = 0; k < 4; ++k) found[k] = last[k];
        }
        const auto two = [&](int k) {
            return static_cast<double>(found[k] << DIGIT_BITS | found[k + 1]);
        };
        const double size = two(0) * power_of_two(2 * DIGIT_BITS) + two(2);
        const int exponent = DIGIT_BITS * (highest - 3) + F::LOWEST, half = exponent / 2;
        const double sum = size * power_of_two(half) * power_of_two(exponent - half);
        return static_cast<Real>(negative ? -sum : sum);
    }

    // Of a word and what the lower ones carry: what stays of it, and what it carries.
    static u64 next_digit(u64 word, i64& carry) {
        const i64 sum = static_cast<i64>(word) + carry;
        carry = sum >> DIGIT_BITS;
        return static_cast<u64>(sum) & DIGIT;
    }
    static double power_of_two(int n) {
        return __longlong_as_double(static_cast<i64>(n + 1023) << 52);
    }
};

// Calls use(sums, slot, first, step) for each array that has sums: a thread's elements are those
// from `first` on. All blocks, of THREADS threads.
template <class Real, int THREADS, class Arguments, class Use>
inline void for_each_sums(const Arguments& args, Use use) {
    const i64 thread = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i64 threads = i64(gridDim.x) * THREADS;
    for (int slot = 0; slot < MOST_ARRAYS; ++slot) {
        const auto sums = ExactSums<Real>::of(args, slot);
        if (sums.words != nullptr) use(sums, slot, thread, threads);
    }
}

}  // namespace ex
