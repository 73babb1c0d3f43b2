// Intervals that hold a number's values for all pairs of a tile, and what is known of a bool.
//
// An interval's ends are computed as its numbers are, each operation rounded on its own: rounding
// is monotone, so the interval holds the rounded values too. What an end cannot bound is unknown.
#pragma once
#include "common/elements.cuh"
#include "score/visibility.cuh"

namespace ex {

template <class T> struct Interval { T low, high; };

// A bool of a tile's pairs.
struct Truth { bool may_be_true, may_be_false; };

template <class T> struct Traits { using Number = T; static constexpr bool HAS_ENDS = false; };
template <class T> struct Traits<Interval<T>> {
    using Number = T;
    static constexpr bool HAS_ENDS = true;
};
template <> struct Traits<Truth> { using Number = bool; static constexpr bool HAS_ENDS = true; };
template <class T> using Number = typename Traits<T>::Number;
template <class... T> constexpr bool NUMBERS = !(Traits<T>::HAS_ENDS || ...);

template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
template <class T> constexpr bool IS_REAL = Same<T, float>::value || Same<T, double>::value;
template <class T> constexpr bool IS_BOOL = Same<T, bool>::value;

// The type of a sum of both.
template <class A, class B> using Common = decltype(true ? Number<A>{} : Number<B>{});

template <class To, class T> inline Interval<To> interval(Interval<T> x) {
    return {static_cast<To>(x.low), static_cast<To>(x.high)};
}
template <class To, class T> inline Interval<To> interval(T x) {
    return {static_cast<To>(x), static_cast<To>(x)};
}
inline Truth truth(Truth x) { return x; }
inline Truth truth(bool x) { return {x, !x}; }

template <class T> inline T infinite() {
    return static_cast<T>(__int_as_float(0x7F800000));
}
// Nothing is known: all values.
template <class T> inline Interval<T> unknown() {
    if constexpr (IS_REAL<T>) return {-infinite<T>(), infinite<T>()};
    else if constexpr (sizeof(T) == 8) return {-9223372036854775807LL - 1, 9223372036854775807LL};
    else return {static_cast<T>(-2147483647 - 1), static_cast<T>(2147483647)};
}
// Ends of ints are computed in an i64; if T may not hold them, nothing is known. (Where a pair's
// own values are ints of 32 bits, ranges.py has proved that they fit.)
template <class T> struct EndsOf { using type = i64; };
template <> struct EndsOf<float> { using type = float; };
template <> struct EndsOf<double> { using type = double; };
template <class T> using Ends = typename EndsOf<T>::type;
template <class T>
inline Interval<T> bounded(Ends<T> low, Ends<T> high, double least, double most) {
    const double limit = IS_REAL<T> ? 0.0 : sizeof(T) == 8 ? 4.0e18 : 2147483647.0;
    if (!IS_REAL<T> && !(least >= -limit && most <= limit)) return unknown<T>();
    return {static_cast<T>(low), static_cast<T>(high)};
}
// Whether both ends are numbers that bound: a NaN may hide behind an infinite one.
template <class T> inline bool bounds(Interval<T> x) {
    if constexpr (IS_REAL<T>) return x.low > -infinite<T>() && x.high < infinite<T>();
    else return true;
}

}  // namespace ex
