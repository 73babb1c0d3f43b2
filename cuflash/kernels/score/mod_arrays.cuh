// Reads of a user's arrays (mod_arrays) by score_mod and mask_mod. No index reads outside an array:
// -n to -1 count from the end, others read 0.
#pragma once
#include "score/expression_functions.cuh"

namespace ex {

// An array as a pair reads it: the AXES that its head has not fixed. Strides count elements.
template <class T, int AXES> struct ModArray {
    const T* data;
    int size[AXES];
    i64 stride[AXES];
};

template <class To> inline To element(float16 x) { return static_cast<To>(to_float(x)); }
template <class To> inline To element(bfloat16 x) { return static_cast<To>(to_float(x)); }
template <class To, class T> inline To element(T x) {
    if constexpr (IS_BOOL<To>) return x != 0;
    else return static_cast<To>(x);
}

// What holds all of several indices: 32 bits if all have as many.
template <bool> struct IntOf { using type = i64; using Unsigned = u64; };
template <> struct IntOf<true> { using type = int; using Unsigned = u32; };
template <class... Index> using Ints = IntOf<(Same<Number<Index>, int>::value && ...)>;

// Of AXES indices, where the element lies, and whether inside.
struct Place { i64 offset; bool inside; };
template <int AXES, class T, class... Index>
inline Place place(const ModArray<T, AXES>& array, Index... given) {
    using Int = typename Ints<Index...>::type;
    using Unsigned = typename Ints<Index...>::Unsigned;
    const Int indices[] = {static_cast<Int>(given)...};
    Place found{0, true};
    #pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
        const Int index = indices[axis] + (indices[axis] < 0 ? array.size[axis] : 0);
        found.inside &= static_cast<Unsigned>(index) < static_cast<Unsigned>(array.size[axis]);
        found.offset += index * array.stride[axis];
    }
    return found;
}

// One element, 0 outside.
template <class To, class T, int AXES>
inline To read(const ModArray<T, AXES>& array, Place at) {
    return at.inside ? element<To>(array.data[at.offset]) : To(0);
}

// Whether [0, size) has all values of an index.
template <class Index> inline bool holds(int size, Index index) {
    const auto all = interval<Number<Index>>(index);
    return all.low >= 0 && all.high < size;
}

// An element whose indices are inside. The offsets of neighbours differ by constants, which become
// part of their loads.
template <int AXES, class T, class... Index>
inline T at(const ModArray<T, AXES>& array, Index... given) {
    const T* element = array.data;
    int axis = 0;
    ((element += given * array.stride[axis++]), ...);
    return *element;
}

// The smallest and largest that a warp's lanes hold. A NaN makes them unknown.
template <class T> inline Interval<T> over_warp(Interval<T> x, bool unordered) {
    if constexpr (HAS_REDUX && Same<T, int>::value)
        return {redux_min(x.low), redux_max(x.high)};       // ints are ordered
    #pragma unroll 1
    for (int distance = 16; distance > 0; distance /= 2) {
        const T low = __shfl_xor_sync(0xFFFFFFFFu, x.low, distance);
        const T high = __shfl_xor_sync(0xFFFFFFFFu, x.high, distance);
        x = {low < x.low ? low : x.low, high > x.high ? high : x.high};
    }
    return __ballot_sync(0xFFFFFFFFu, unordered) != 0 ? unknown<T>() : x;
}

// A longer slice is not looked at: its values are unknown.
constexpr i64 LONGEST_SLICE = 4096;

// Bools are compared as ints.
template <class To> struct EndOf { using type = To; };
template <> struct EndOf<bool> { using type = int; };

template <class To> inline auto nothing_known() {
    if constexpr (IS_BOOL<To>) return Truth{true, true};
    else return unknown<To>();
}
// The ends of int values as those of a To; bools are 0 and 1.
template <class To, class T> inline auto as_ends(Interval<T> x) {
    if constexpr (IS_BOOL<To>) return Truth{x.high != 0, x.low == 0};
    else return x;
}

// The elements from index `first` to `last` of an axis. Whole warp. Not inline: a mask that reads
// several, such as two slices of document ids, is kept short, as its instructions come from memory.
template <class To, class T>
__noinline__ Interval<typename EndOf<To>::type> slice(
    const T* data, i64 stride, int size, i64 first, i64 last) {
    using End = typename EndOf<To>::type;
    const u64 more = static_cast<u64>(last) - static_cast<u64>(first);      // elements than one
    if (more > 0 && (first < 0 || last >= size || more >= LONGEST_SLICE)) {
        if constexpr (IS_BOOL<To>) return {0, 1};
        else return unknown<To>();
    }
    first += first < 0 ? size : 0;
    if (static_cast<u64>(first) >= static_cast<u64>(size)) return {0, 0};
    const T* start = data + first * stride;
    const auto number = [&](i64 i) { return static_cast<End>(element<To>(start[i * stride])); };
    Interval<End> found = interval<End>(number(0));
    bool unordered = found.low != found.low;
    #pragma unroll 2
    for (u64 i = threadIdx.x % 32; i <= more; i += 32) {
        const End x = number(i);
        unordered |= x != x;
        found = {x < found.low ? x : found.low, x > found.high ? x : found.high};
    }
    return over_warp(found, unordered);
}

template <class Index> constexpr bool RANGES = Traits<Index>::HAS_ENDS;
template <class Index> inline i64 first_of(Index x) {
    if constexpr (RANGES<Index>) return x.low;
    else return x;
}
template <class Index> inline i64 last_of(Index x) {
    if constexpr (RANGES<Index>) return x.high;
    else return x;
}

// array[index, ...]: a number; of ranges of indices an interval. WHOLE_WARP looks at the slice if
// one index at most has a range of several, inside the array; without it, only single elements are
// known, and none OVER_KEYS, whose indices depend on the key, of which a tile has several. INSIDE:
// the indices of a number are known to be.
template <class To, bool WHOLE_WARP, bool INSIDE = false, bool OVER_KEYS = false, class T, int AXES,
          class... Index>
inline auto gather(const ModArray<T, AXES>& array, Index... index) {
    static_assert(sizeof...(Index) == AXES, "an index for each axis");
    if constexpr (NUMBERS<Index...> && INSIDE) {
        return element<To>(at(array, index...));
    } else if constexpr (NUMBERS<Index...>) {
        return read<To>(array, place(array, index...));
    } else if constexpr (OVER_KEYS && !WHOLE_WARP) {
        return nothing_known<To>();
    } else if constexpr (WHOLE_WARP && AXES == 1) {
        return as_ends<To>(slice<To>(
            array.data, array.stride[0], array.size[0], first_of(index)..., last_of(index)...));
    } else {
        using End = typename EndOf<To>::type;
        using Int = typename Ints<Index...>::type;
        const Int first[] = {static_cast<Int>(first_of(index))...};
        const Int last[] = {static_cast<Int>(last_of(index))...};
        int ranging = 0, count = 1;                         // axes with ranges; elements of one
        i64 stride = 0;
        Place at{0, true};
        #pragma unroll
        for (int axis = 0; axis < AXES; ++axis) {
            Int here = first[axis];
            if (here != last[axis]) {
                if (here < 0 || last[axis] >= array.size[axis]) return nothing_known<To>();
                // So that the difference does not overflow.
                if (last[axis] - here >= LONGEST_SLICE) return nothing_known<To>();
                ++ranging;
                count = static_cast<int>(last[axis] - here) + 1;
                stride = array.stride[axis];
            }
            here += here < 0 ? array.size[axis] : 0;
            at.inside &= static_cast<typename Ints<Index...>::Unsigned>(here)
                       < static_cast<typename Ints<Index...>::Unsigned>(array.size[axis]);
            at.offset += here * array.stride[axis];
        }
        if (ranging > 1) return nothing_known<To>();
        if (ranging == 0 || !at.inside)
            return as_ends<To>(interval<End>(static_cast<End>(read<To>(array, at))));
        if constexpr (WHOLE_WARP)
            return as_ends<To>(slice<To>(array.data + at.offset, stride, count, 0, count - 1));
        else return nothing_known<To>();
    }
}

// A number of mod_arrays, from its bits.
template <class To> inline To number(u64 bits) {
    if constexpr (IS_REAL<To>) return static_cast<To>(__longlong_as_double(static_cast<i64>(bits)));
    else if constexpr (IS_BOOL<To>) return bits != 0;
    else return static_cast<To>(bits);
}

}  // namespace ex
