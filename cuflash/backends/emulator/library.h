// The functions of the C library that kernels call, by their parameters: float(float) and so on.
// cuda_host.h declares them; engine_image.h gives them to kernels, which have no libraries.
#pragma once

#define EMULATOR_OF_FLOAT(F) \
    F(fabsf) F(expf) F(exp2f) F(logf) F(tanhf) F(sqrtf) F(rintf) F(floorf) F(ceilf) F(truncf) \
    F(expm1f) F(log2f) F(log10f) F(log1pf) F(sinf) F(cosf) F(erff) F(erfcf) F(atanf)
#define EMULATOR_OF_FLOATS(F) F(copysignf) F(fmaxf) F(fminf) F(powf) F(fmodf)
#define EMULATOR_OF_DOUBLE(F) \
    F(fabs) F(exp) F(exp2) F(log) F(tanh) F(sqrt) F(rint) F(floor) F(ceil) F(trunc) \
    F(expm1) F(log2) F(log10) F(log1p) F(sin) F(cos) F(erf) F(erfc) F(atan)
#define EMULATOR_OF_DOUBLES(F) F(copysign) F(fmax) F(pow) F(fmod)
