// What the lanes of a warp do together: exchanges of values, MMAs. The last lane to arrive does it
// for all. A part of engine.cpp, which the compiler optimises more than kernels, without checks of
// single accesses.
#pragma once

namespace emulator {
namespace {

template <class Operands> const Operands& operands_of(void* const (&lanes)[32], int lane) {
    return *static_cast<const Operands*>(lanes[lane]);
}

template <class Operands>
void meet_with(
    const char* operation, const Operands& own, Meaning meaning, Site site,
    uint32_t mask = WHOLE_WARP) {
    meet(operation, mask, const_cast<Operands*>(&own), meaning, site);
}

struct Shuffle { const void* value; void* result; int bytes, partner; };

// A partner outside the mask has no value.
void exchange(void* const (&lanes)[32]) {
    for (const void* lane : lanes) {
        if (lane == nullptr) continue;
        const Shuffle& own = *static_cast<const Shuffle*>(lane);
        const auto* partner = static_cast<const Shuffle*>(lanes[own.partner]);
        if (partner == nullptr) memset(own.result, 0xFF, static_cast<size_t>(own.bytes));
        else if (own.bytes == 4) memcpy(own.result, partner->value, 4);
        else memcpy(own.result, partner->value, static_cast<size_t>(own.bytes));
    }
}

struct Ballot { bool predicate; uint32_t* result; };

void count_votes(void* const (&lanes)[32]) {
    uint32_t result = 0;
    for (int i = 0; i < LANES; ++i)
        if (lanes[i] != nullptr && operands_of<Ballot>(lanes, i).predicate) result |= 1u << i;
    for (const void* lane : lanes)
        if (lane != nullptr) *static_cast<const Ballot*>(lane)->result = result;
}

// ---- Matrices of 8 x 8 elements of 16 bits ----

struct LdmatrixOperands { const uint32_t* row; uint32_t* r; };

// Of matrix i, lane l gets elements 2(l % 4) and 2(l % 4) + 1 of row l / 4; transposed: of column.
template <bool TRANSPOSED> void load_matrices(void* const (&lanes)[32]) {
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < LANES; ++lane) {
            const int line = lane / 4, pair = lane % 4;
            const auto element = [&](int row, int column) {
                const LdmatrixOperands& of = operands_of<LdmatrixOperands>(lanes, i * 8 + row);
                return of.row[column / 2] >> (column % 2 * 16) & 0xFFFF;
            };
            operands_of<LdmatrixOperands>(lanes, lane).r[i] = TRANSPOSED
                ? element(2 * pair, line) | element(2 * pair + 1, line) << 16
                : element(line, 2 * pair) | element(line, 2 * pair + 1) << 16;
        }
}

struct MovmatrixOperands { uint32_t pair; uint32_t* transposed; };

void move_matrix(void* const (&lanes)[32]) {
    const auto element = [&](int row, int column) {
        const uint32_t pair = operands_of<MovmatrixOperands>(lanes, row * 4 + column / 2).pair;
        return pair >> (column % 2 * 16) & 0xFFFF;
    };
    for (int lane = 0; lane < LANES; ++lane)
        *operands_of<MovmatrixOperands>(lanes, lane).transposed =
            element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
}

struct StmatrixOperands { uint32_t* row; uint32_t r[4]; };

// Lane l gives the address of row l % 8 of matrix l / 8.
void store_matrices(void* const (&lanes)[32]) {
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < LANES; ++lane)
            operands_of<StmatrixOperands>(lanes, i * 8 + lane / 4).row[lane % 4] =
                operands_of<StmatrixOperands>(lanes, lane).r[i];
}

// ---- MMAs ----

struct MmaOperands { float* d; const uint32_t* a; uint32_t b[2]; };

void read_sums(float (&d)[16][8], void* const (&lanes)[32]) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < 4; ++i)
            d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2] =
                operands_of<MmaOperands>(lanes, lane).d[i];
}

void write_sums(const float (&d)[16][8], void* const (&lanes)[32]) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < 4; ++i)
            operands_of<MmaOperands>(lanes, lane).d[i] =
                d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

// The first or second half of 16 products, as an MMA of 8.
void multiply_add_half(
    float (&d)[16][8], const float (&a)[16][16], const float (&b)[16][8], int half) {
    float columns[16][16] = {}, rows[16][8] = {};           // eight more products of 0
    for (int k = half * 8; k < half * 8 + 8; ++k) {
        for (int i = 0; i < 16; ++i) columns[i][k] = a[i][k];
        for (int j = 0; j < 8; ++j) rows[k][j] = b[k][j];
    }
    multiply_add(d, columns, rows);
}

template <bool BFLOAT16, bool HALVES> void multiply_16x8x16(void* const (&lanes)[32]) {
    float a[16][16], b[16][8], d[16][8];
    const auto number = [](uint32_t bits) {
        return value_of_16_bits(static_cast<uint16_t>(bits), BFLOAT16);
    };
    for (int lane = 0; lane < LANES; ++lane) {
        const MmaOperands& own = operands_of<MmaOperands>(lanes, lane);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            const int row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
            a[row][column] = number(own.a[i]);
            a[row][column + 1] = number(own.a[i] >> 16);
        }
        for (int i = 0; i < 2; ++i) {
            b[2 * t + i * 8][g] = number(own.b[i]);
            b[2 * t + i * 8 + 1][g] = number(own.b[i] >> 16);
        }
    }
    read_sums(d, lanes);
    if (HALVES)
        for (int half = 0; half < 2; ++half) multiply_add_half(d, a, b, half);
    else
        multiply_add(d, a, b);
    write_sums(d, lanes);
}

float tf32(uint32_t bits) {
    float x;
    bits &= 0xFFFFE000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

void multiply_16x8x8_tf32(void* const (&lanes)[32]) {
    float a[16][16] = {}, b[16][8] = {}, d[16][8];          // eight more products of 0
    for (int lane = 0; lane < LANES; ++lane) {
        const MmaOperands& own = operands_of<MmaOperands>(lanes, lane);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = tf32(own.a[i]);
        for (int i = 0; i < 2; ++i) b[t + i * 4][g] = tf32(own.b[i]);
    }
    read_sums(d, lanes);
    multiply_add(d, a, b);
    write_sums(d, lanes);
}

}  // namespace

void shuffle(const char* operation, uint32_t mask, const void* value, void* result, int bytes,
             int partner, Site site) {
    meet_with(operation, Shuffle{value, result, bytes, partner}, exchange, site, mask);
}

uint32_t ballot(uint32_t mask, bool predicate, Site site) {
    uint32_t result = 0;
    meet_with("__ballot_sync", Ballot{predicate, &result}, count_votes, site, mask);
    return result;
}

void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed, Site site) {
    const LdmatrixOperands own{
        static_cast<const uint32_t*>(shared_memory(address, 16, 16, Access::READ_BY_WARP, site)),
        r};
    meet_with("ldmatrix", own, transposed ? load_matrices<true> : load_matrices<false>, site);
}

uint32_t movmatrix(uint32_t pair, Site site) {
    uint32_t transposed = 0;
    meet_with("movmatrix", MovmatrixOperands{pair, &transposed}, move_matrix, site);
    return transposed;
}

// A lane's own 16 bytes are checked as its own.
void stmatrix(uint32_t address, const uint32_t (&r)[4], Site site) {
    const StmatrixOperands own{
        static_cast<uint32_t*>(shared_memory(address, 16, 16, Access::WRITE, site)),
        {r[0], r[1], r[2], r[3]}};
    meet_with("stmatrix", own, store_matrices, site);
}

void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bfloat16,
                 bool halves, Site site) {
    const Meaning meaning =
        bfloat16 ? halves ? multiply_16x8x16<true, true> : multiply_16x8x16<true, false>
                 : halves ? multiply_16x8x16<false, true> : multiply_16x8x16<false, false>;
    meet_with("mma.sync", MmaOperands{d, a, {b0, b1}}, meaning, site);
}

void mma_16x8x8_tf32(
    float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site) {
    meet_with("mma.sync", MmaOperands{d, a, {b0, b1}}, multiply_16x8x8_tf32, site);
}

}  // namespace emulator
