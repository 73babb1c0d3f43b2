// A row's reference r, which W, the tangent of its scores, is taken relative to. For any r
//
//     b - r = sum_j P_j (W_j - r),  O' = sum_j P_j ((W_j - r) V_j + V'_j) - (b - r) O
//
// where dropout's Z multiplies P in O' and O, and a sink, whose W is s', adds to b alone. r is the
// mean of W, by weight, over the row's first tile of keys. So |W - r| is at most the difference of
// two W of the row: what all keys share cancels before it is multiplied and rounded.
//
// infinity(), declared before: softmax.cuh.
#pragma once

// Whether a mean can be a reference. Where W or a sum of it is NaN or infinite, r is 0.
template <class Real> inline bool is_reference(Real mean) { return fabs(mean) < Real(infinity()); }
