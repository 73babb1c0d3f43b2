// The operations of a user's score_mod and mask_mod: what score/expression.cuh, which
// cuflash/expressions/text.py writes, calls. cuflash/expressions/functions.py has the same rows.
//
// Operands are numbers, or intervals that hold the values of a whole tile (intervals.cuh).
#pragma once
#include "score/approximations.cuh"
#include "score/intervals.cuh"

namespace ex {

// ---- Arithmetic ----

template <class To, class A> inline auto to(A a) {
    if constexpr (NUMBERS<A>) return static_cast<To>(a);
    else if constexpr (Same<A, Truth>::value)
        return Interval<To>{static_cast<To>(!a.may_be_false), static_cast<To>(a.may_be_true)};
    else return interval<To>(a);
}
// Sums and products of 64-bit ints wrap, as NumPy's: C++ leaves them open. Ints of 32 bits do not
// overflow (cuflash/expressions/ranges.py), nor do ends of intervals.
template <class T> inline auto wrapping(T x) {
    if constexpr (Same<T, i64>::value) return static_cast<u64>(x);
    else return x;
}
template <class T> inline T opposite(T a) { return static_cast<T>(-wrapping(a)); }
template <class T> inline T product(T a, T b) {
    if constexpr (IS_REAL<T>) return rounded(a, b);
    else return static_cast<T>(wrapping(a) * wrapping(b));
}
template <class A, class B> inline auto add(A a, B b) {
    if constexpr (NUMBERS<A, B>) return static_cast<Common<A, B>>(wrapping(a) + wrapping(b));
    else {
        using T = Common<A, B>;
        const Interval<Ends<T>> u = interval<Ends<T>>(interval<T>(a));
        const Interval<Ends<T>> v = interval<Ends<T>>(interval<T>(b));
        if constexpr (Same<T, int>::value) {                // sums of 64 bits do not overflow
            const i64 low = u.low + v.low, high = u.high + v.high;
            const bool fits = low == static_cast<int>(low) && high == static_cast<int>(high);
            return fits ? Interval<T>{static_cast<int>(low), static_cast<int>(high)} : unknown<T>();
        }
        const double least = double(u.low) + double(v.low), most = double(u.high) + double(v.high);
        if (!IS_REAL<T> && !(least > -9.0e18 && most < 9.0e18)) return unknown<T>();
        return bounded<T>(u.low + v.low, u.high + v.high, least, most);
    }
}
template <class A> inline auto negative(A a) {
    if constexpr (NUMBERS<A>) return opposite(a);
    else if constexpr (IS_REAL<Number<A>>) return A{-a.high, -a.low};
    else {
        using T = Number<A>;
        if (a.low == unknown<T>().low) return unknown<T>();     // its opposite is no T
        return A{-a.high, -a.low};
    }
}
template <class A, class B> inline auto subtract(A a, B b) {
    if constexpr (NUMBERS<A, B>) return static_cast<Common<A, B>>(wrapping(a) - wrapping(b));
    else return add(a, negative(b));
}
// The smallest and largest of f at the corners.
template <class T, class F> inline Interval<T> corners(Interval<T> a, Interval<T> b, F f) {
    const T w = f(a.low, b.low), x = f(a.low, b.high), y = f(a.high, b.low), z = f(a.high, b.high);
    const auto less = [](T p, T q) { return p < q ? p : q; };
    const auto more = [](T p, T q) { return p < q ? q : p; };
    return {less(less(w, x), less(y, z)), more(more(w, x), more(y, z))};
}
template <class A, class B> inline auto multiply(A a, B b) {
    if constexpr (NUMBERS<A, B>) return product<Common<A, B>>(a, b);
    else {
        using T = Common<A, B>;
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        const auto size = [](Interval<T> x) {
            const double low = fabs(double(x.low)), high = fabs(double(x.high));
            return low < high ? high : low;
        };
        if (!bounds(u) || !bounds(v)) return unknown<T>();
        const double most = size(u) * size(v);
        if (!IS_REAL<T> && !(most < 9.0e18)) return unknown<T>();
        const auto ends = corners(interval<Ends<T>>(u), interval<Ends<T>>(v),
                                  [](Ends<T> x, Ends<T> y) { return product(x, y); });
        return bounded<T>(ends.low, ends.high, -most, most);
    }
}
// a b + c, rounded once.
template <class T> inline T multiply_add(T a, T b, T c) { return fma(a, b, c); }
// a b; 0 where a is, though b may be infinite or NaN.
template <class T> inline T product_if(T a, T b) { return a == T(0) ? a : a * b; }

// FAST: of 16-bit elements, to some 2^-22 of the result, and a / a may differ from 1.
template <bool FAST, class A, class B> inline auto divide(A a, B b) {
    if constexpr (NUMBERS<A, B>) {
        if constexpr (FAST) return divide_approx(a, b);
        else return a / b;
    } else {
        using T = Common<A, B>;
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!bounds(u) || !bounds(v) || (v.low <= T(0) && v.high >= T(0))) return unknown<T>();
        return corners(u, v, [](T x, T y) { return x / y; });
    }
}
// a / b of a constant b, whose inverse is known.
template <bool FAST, class T> inline T divide_constant(T a, T b, T inverse) {
    return FAST ? a * inverse : a / b;
}

// Python's: rounded down. An int divided by 0 is 0; reals as NumPy's npy_divmod has them.
template <class T> inline T floor_quotient(T a, T b) {
    if constexpr (IS_REAL<T>) {
        if (b == T(0)) return a / b;
        const T rest = fmod(a, b);
        T quotient = (a - rest) / b;
        if (rest != T(0) && (b < T(0)) != (rest < T(0))) quotient -= T(1);
        if (quotient == T(0)) return copysign(T(0), a / b);
        const T down = floor(quotient);
        return quotient - down > T(0.5) ? down + T(1) : down;
    } else {
        if (b == 0) return 0;
        if (b == -1) return opposite(a);
        const T quotient = a / b;
        return quotient - (a % b != 0 && (a < 0) != (b < 0));
    }
}
// Has the sign of the divisor, as Python's.
template <class T> inline T floor_rest(T a, T b) {
    if constexpr (IS_REAL<T>) {
        if (b == T(0)) return fmod(a, b);
        const T rest = fmod(a, b);
        if (rest == T(0)) return copysign(T(0), b);
        return (b < T(0)) != (rest < T(0)) ? rest + b : rest;
    } else {
        if (b == 0 || b == -1) return 0;
        const T rest = a % b;
        return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }
}
template <class A, class B> inline auto floor_divide(A a, B b) {
    if constexpr (NUMBERS<A, B>) return floor_quotient<Common<A, B>>(a, b);
    else {
        using T = Common<A, B>;
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!bounds(u) || !bounds(v) || v.low <= T(0)) return unknown<T>();
        return corners(u, v, [](T x, T y) { return floor_quotient(x, y); });
    }
}
template <class A, class B> inline auto remainder(A a, B b) {
    if constexpr (NUMBERS<A, B>) return floor_rest<Common<A, B>>(a, b);
    else {
        using T = Common<A, B>;
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!bounds(u) || !bounds(v) || v.low <= T(0)) return unknown<T>();
        const T first = floor_quotient(u.low, v.low), last = floor_quotient(u.high, v.low);
        // No multiple in between. A quotient of many bits is rounded, and tells nothing.
        const bool exact = !IS_REAL<T> || (first > T(-65536) && first < T(65536));
        if (v.low == v.high && first == last && exact)
            return Interval<T>{floor_rest(u.low, v.low), floor_rest(u.high, v.low)};
        return Interval<T>{T(0), IS_REAL<T> ? v.high : v.high - T(1)};
    }
}
template <class A> inline auto absolute(A a) {
    if constexpr (NUMBERS<A>) {
        if constexpr (IS_REAL<A>) return fabs(a);
        else return a < 0 ? opposite(a) : a;
    } else {
        using T = Number<A>;
        if (!bounds(a) || a.low == unknown<T>().low) return unknown<T>();   // -2^63 has no opposite
        if (a.low >= T(0)) return a;
        const A b = negative(a);
        if (a.high <= T(0)) return b;
        return A{T(0), b.high > a.high ? b.high : a.high};
    }
}
template <class T> inline T sign_of(T a) {
    return a > T(0) ? T(1) : a < T(0) ? T(-1) : a;          // of a 0 or a NaN: itself
}
template <class A> inline auto sign(A a) {
    if constexpr (NUMBERS<A>) return sign_of(a);
    else return bounds(a) ? A{sign_of(a.low), sign_of(a.high)} : unknown<Number<A>>();
}
// A NaN wins, as in NumPy; of equal ones, the first.
template <class T> inline T smaller(T a, T b) { return a <= b || a != a ? a : b; }
template <class T> inline T larger(T a, T b) { return a >= b || a != a ? a : b; }
template <class A, class B> inline auto minimum(A a, B b) {
    using T = Common<A, B>;
    if constexpr (NUMBERS<A, B>) return smaller<T>(a, b);
    else {
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!bounds(u) || !bounds(v)) return unknown<T>();
        return Interval<T>{smaller(u.low, v.low), smaller(u.high, v.high)};
    }
}
template <class A, class B> inline auto maximum(A a, B b) {
    using T = Common<A, B>;
    if constexpr (NUMBERS<A, B>) return larger<T>(a, b);
    else {
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!bounds(u) || !bounds(v)) return unknown<T>();
        return Interval<T>{larger(u.low, v.low), larger(u.high, v.high)};
    }
}

// ---- Comparisons: an int and a real as doubles, which hold both ----

template <bool MIXED, class T> struct ComparedType { using type = T; };
template <class T> struct ComparedType<true, T> { using type = double; };
template <class A, class B> using Compared = typename ComparedType<
    IS_REAL<Number<A>> != IS_REAL<Number<B>>, Common<A, B>>::type;

template <class A, class B> inline auto less(A a, B b) {
    using T = Compared<A, B>;
    if constexpr (NUMBERS<A, B>) return static_cast<T>(a) < static_cast<T>(b);
    else {
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!bounds(u) || !bounds(v)) return Truth{true, true};
        return Truth{u.low < v.high, u.high >= v.low};
    }
}
template <class A, class B> inline auto less_equal(A a, B b) {
    using T = Compared<A, B>;
    if constexpr (NUMBERS<A, B>) return static_cast<T>(a) <= static_cast<T>(b);
    else {
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!bounds(u) || !bounds(v)) return Truth{true, true};
        return Truth{u.low <= v.high, u.high > v.low};
    }
}
template <class A, class B> inline auto greater(A a, B b) { return less(b, a); }
template <class A, class B> inline auto greater_equal(A a, B b) { return less_equal(b, a); }

template <class A, class B> inline auto bitwise_and(A a, B b);
template <class A> inline auto invert(A a);

template <class A, class B> inline auto equal(A a, B b) {
    using T = Compared<A, B>;
    if constexpr (NUMBERS<A, B>) return static_cast<T>(a) == static_cast<T>(b);
    else if constexpr (IS_BOOL<Number<A>> && IS_BOOL<Number<B>>) {
        const Truth u = truth(a), v = truth(b);
        return Truth{(u.may_be_true && v.may_be_true) || (u.may_be_false && v.may_be_false),
                     (u.may_be_true && v.may_be_false) || (u.may_be_false && v.may_be_true)};
    } else {
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!bounds(u) || !bounds(v)) return Truth{true, true};
        return Truth{u.low <= v.high && v.low <= u.high,
                     !(u.low == u.high && v.low == v.high && u.low == v.low)};
    }
}
template <class A, class B> inline auto not_equal(A a, B b) { return invert(equal(a, b)); }

template <class A> inline auto isnan(A a) {
    if constexpr (NUMBERS<A>) return a != a;
    else return Truth{!bounds(a), true};
}
template <class A> inline auto isinf(A a) {
    if constexpr (NUMBERS<A>) return fabs(a) == infinite<A>();
    else return Truth{!bounds(a), true};
}

// ---- Bits, and whole truth values ----

template <class A, class B> inline auto bitwise_and(A a, B b) {
    if constexpr (NUMBERS<A, B>) return static_cast<Common<A, B>>(a & b);
    else if constexpr (IS_BOOL<Number<A>>) {
        const Truth u = truth(a), v = truth(b);
        return Truth{u.may_be_true && v.may_be_true, u.may_be_false || v.may_be_false};
    } else {
        return unknown<Common<A, B>>();
    }
}
template <class A, class B> inline auto bitwise_or(A a, B b) {
    if constexpr (NUMBERS<A, B>) return static_cast<Common<A, B>>(a | b);
    else if constexpr (IS_BOOL<Number<A>>) {
        const Truth u = truth(a), v = truth(b);
        return Truth{u.may_be_true || v.may_be_true, u.may_be_false && v.may_be_false};
    } else {
        return unknown<Common<A, B>>();
    }
}
template <class A, class B> inline auto bitwise_xor(A a, B b) {
    if constexpr (NUMBERS<A, B>) return static_cast<Common<A, B>>(a ^ b);
    else if constexpr (IS_BOOL<Number<A>>) return not_equal(a, b);
    else return unknown<Common<A, B>>();
}
template <class A> inline auto invert(A a) {
    if constexpr (IS_BOOL<A>) return !a;
    else if constexpr (NUMBERS<A>) return ~a;
    else if constexpr (IS_BOOL<Number<A>>) return Truth{a.may_be_false, a.may_be_true};
    else return A{~a.high, ~a.low};
}
// By 0 to 62 bits; the result is an i64.
inline int bits_of(i64 b) { return b < 0 ? 0 : b > 62 ? 62 : static_cast<int>(b); }
template <class A, class B> inline auto left_shift(A a, B b) {
    if constexpr (NUMBERS<A, B>)
        return static_cast<i64>(static_cast<u64>(static_cast<i64>(a)) << bits_of(b));
    else if constexpr (NUMBERS<B>) return multiply(to<i64>(a), i64{1} << bits_of(b));
    else return unknown<i64>();
}
template <class A, class B> inline auto right_shift(A a, B b) {
    if constexpr (NUMBERS<A, B>) return static_cast<i64>(a) >> bits_of(b);
    else if constexpr (NUMBERS<B>) {
        const Interval<i64> u = interval<i64>(a);
        return Interval<i64>{u.low >> bits_of(b), u.high >> bits_of(b)};
    } else {
        return unknown<i64>();
    }
}

template <class C, class A, class B> inline auto where(C condition, A a, B b) {
    if constexpr (NUMBERS<C, A, B>) return condition ? a : b;
    else if constexpr (IS_BOOL<Number<A>>) {
        const Truth c = truth(condition), u = truth(a), v = truth(b);
        return Truth{(c.may_be_true && u.may_be_true) || (c.may_be_false && v.may_be_true),
                     (c.may_be_true && u.may_be_false) || (c.may_be_false && v.may_be_false)};
    } else {
        using T = Common<A, B>;
        const Truth c = truth(condition);
        const Interval<T> u = interval<T>(a), v = interval<T>(b);
        if (!c.may_be_false) return u;
        if (!c.may_be_true) return v;
        if (!bounds(u) || !bounds(v)) return unknown<T>();
        return Interval<T>{u.low < v.low ? u.low : v.low, u.high > v.high ? u.high : v.high};
    }
}

// Truncates; a real that no i64 holds is 0.
template <class A> inline auto to_int(A a) {
    if constexpr (NUMBERS<A>) return fabs(a) < A(9.223372036854775808e18) ? static_cast<i64>(a) : 0;
    else {
        if (!(a.low > -4.0e18 && a.high < 4.0e18)) return unknown<i64>();
        return Interval<i64>{static_cast<i64>(a.low), static_cast<i64>(a.high)};
    }
}

// ---- Functions of one real ----

// Those whose rounded values are monotone: exact ones, and the square root.
template <class A, class F> inline auto monotone(A a, F f) {
    if constexpr (NUMBERS<A>) return f(a);
    else return bounds(a) ? A{f(a.low), f(a.high)} : unknown<Number<A>>();
}
// Those of a library, which may err by a few units: ends are moved by 2^-18 of their size.
template <class A, class F> inline auto nearly_monotone(A a, F f) {
    if constexpr (NUMBERS<A>) return f(a);
    else {
        using T = Number<A>;
        if (!bounds(a)) return unknown<T>();
        const T low = f(a.low), high = f(a.high), by = T(0x1p-18);
        return A{low - fabs(low) * by - T(1e-30), high + fabs(high) * by + T(1e-30)};
    }
}
// Those from -1 to 1 that turn around.
template <class A, class F> inline auto wave(A a, F f) {
    if constexpr (NUMBERS<A>) return f(a);
    else return bounds(a) ? A{-1, 1} : unknown<Number<A>>();
}

template <class A> inline auto floor(A a) {
    return monotone(a, [](auto x) { return ::floor(x); });
}
template <class A> inline auto ceil(A a) { return monotone(a, [](auto x) { return ::ceil(x); }); }
template <class A> inline auto trunc(A a) {
    return monotone(a, [](auto x) { return ::trunc(x); });
}
template <class A> inline auto rint(A a) { return monotone(a, [](auto x) { return ::rint(x); }); }
template <class A> inline auto sqrt(A a) {
    return monotone(a, [](auto x) { return ::sqrt(x); });   // of a negative end: NaN, unknown
}

// FAST: of 16-bit elements, to some 2^-22 of the result.
template <bool FAST, class A> inline auto exp(A a) {
    return nearly_monotone(a, [](auto x) {
        if constexpr (FAST) return exp2_approx(x * 1.4426950408889634f);
        else return ::exp(x);
    });
}
template <bool FAST, class A> inline auto exp2(A a) {
    return nearly_monotone(a, [](auto x) {
        if constexpr (FAST) return exp2_approx(x);
        else return ::exp2(x);
    });
}
template <bool FAST, class A> inline auto tanh(A a) {
    return nearly_monotone(a, [](auto x) {
        if constexpr (FAST) return tanh_approx(2.8853900817779268f * x);
        else return ::tanh(x);
    });
}
template <class A> inline auto expm1(A a) {
    return nearly_monotone(a, [](auto x) { return ::expm1(x); });
}
template <class A> inline auto log(A a) {
    return nearly_monotone(a, [](auto x) { return ::log(x); });
}
template <class A> inline auto log2(A a) {
    return nearly_monotone(a, [](auto x) { return ::log2(x); });
}
template <class A> inline auto log10(A a) {
    return nearly_monotone(a, [](auto x) { return ::log10(x); });
}
template <class A> inline auto log1p(A a) {
    return nearly_monotone(a, [](auto x) { return ::log1p(x); });
}
template <class A> inline auto arctan(A a) {
    return nearly_monotone(a, [](auto x) { return ::atan(x); });
}
template <class A> inline auto erf(A a) {
    return nearly_monotone(a, [](auto x) { return ::erf(x); });
}
template <class A> inline auto erfc(A a) {                  // falls: of -a it rises
    return nearly_monotone(negative(a), [](auto x) { return ::erfc(-x); });
}
template <class A> inline auto sin(A a) { return wave(a, [](auto x) { return ::sin(x); }); }
template <class A> inline auto cos(A a) { return wave(a, [](auto x) { return ::cos(x); }); }
template <class A, class B> inline auto power(A a, B b) {
    if constexpr (NUMBERS<A, B>) return ::pow(a, b);
    else return unknown<Common<A, B>>();
}

}  // namespace ex
