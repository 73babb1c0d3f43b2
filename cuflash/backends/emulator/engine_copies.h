// Addresses of shared and global memory, and cp.async copies. A part of engine.cpp.
#pragma once

namespace emulator {

int rank_in_cluster() { return thread->index / launch.block_threads; }

uint32_t first_byte_of_block() {
    return static_cast<uint32_t>(rank_in_cluster() * launch.block_shared);
}

constexpr int RANK_BIT = 24;

uint32_t address_in_cluster(int64_t offset) {
    const int64_t rank = offset / launch.block_shared;
    return static_cast<uint32_t>(rank << RANK_BIT | offset % launch.block_shared);
}

uint32_t shared_of_rank(uint32_t address, int rank) {
    return static_cast<uint32_t>(rank) << RANK_BIT | (address & ((1u << RANK_BIT) - 1));
}

// Where the byte at a shared address is in shared_bytes.
uint32_t offset_of(uint32_t address) {
    if (launch.cluster == 1) return address;
    return (address >> RANK_BIT) * static_cast<uint32_t>(launch.block_shared)
         + (address & ((1u << RANK_BIT) - 1));
}

namespace {

int rank_of(uint32_t address) {
    return launch.cluster == 1 ? 0 : static_cast<int>(address >> RANK_BIT);
}

// Only bulk copies and arrivals take addresses of other blocks.
void check_own(uint32_t address, Site site) {
    if (launch.cluster > 1 && rank_of(address) != rank_in_cluster())
        fault(site, "an address in the shared memory of block %d of the cluster, in block %d",
              rank_of(address), rank_in_cluster());
}

bool has_ended(int rank) {
    const auto first = block->threads.begin() + rank * launch.block_threads;
    return std::all_of(first, first + launch.block_threads,
                       [](const Thread& t) { return t.state == State::ENDED; });
}

// A block's shared memory ends with its last thread.
void check_reachable(uint32_t address, Site site) {
    const int rank = rank_of(address);
    if (launch.cluster == 1 || rank == rank_in_cluster()) return;
    if (rank >= launch.cluster) fault(site, "block %d of a cluster of %d", rank, launch.cluster);
    if (has_ended(rank))
        fault(site, "reaches the shared memory of block %d of the cluster, which has ended", rank);
}

}  // namespace

void* shared_memory(uint32_t address, int bytes, int alignment, Access access, Site site) {
    check_own(address, site);
    address = offset_of(address);
    const auto where = [&] { return here(site); };
    check_alignment(address, alignment, where);
    check_shared(address, bytes, access, where);
    return shared_bytes + address;
}

void check_global(const void* address, int bytes, int alignment, Access access, Site site) {
    const auto where = [&] { return here(site); };
    const auto number = reinterpret_cast<uint64_t>(address);
    check_alignment(number, alignment, where);
    check_array(number, bytes, access, where);
}

// The target of a copy of `read` of `bytes` bytes, checked as its source is.
void* target_of_copy(uint32_t target, const void* source, int bytes, int read, Site site) {
    if (read < 0 || read > bytes) fault(site, "cp.async reads %d of %d bytes", read, bytes);
    check_alignment(reinterpret_cast<uint64_t>(source), bytes, [&] { return here(site); });
    if (read > 0) check_global(source, read, 1, Access::READ, site);
    return shared_memory(target, bytes, bytes, Access::WRITE, site);
}

void copy_now(uint32_t target, const void* source, int bytes, int read, Site site) {
    void* to = target_of_copy(target, source, bytes, read, site);
    memset(to, 0, static_cast<size_t>(bytes));
    memcpy(to, source, static_cast<size_t>(read));
}

void copy_later(uint32_t target, const void* source, int bytes, int read, Site site) {
    memset(target_of_copy(target, source, bytes, read, site), 0xFF, static_cast<size_t>(bytes));
    target = offset_of(target);
    for (uint32_t i = target / GRANULE; i < (target + bytes) / GRANULE; ++i)
        block->granules[i].landing = static_cast<uint16_t>(thread->index + 1);
    thread->copies.push_back({target, static_cast<const unsigned char*>(source), bytes, read});
}

void commit_copies() {
    thread->groups.push_back(std::move(thread->copies));
    thread->copies.clear();
}

void wait_for_copies(int pending) {
    while (static_cast<int>(thread->groups.size()) > pending) {
        for (const Copy& copy : thread->groups.front()) {
            memset(shared_bytes + copy.target, 0, static_cast<size_t>(copy.bytes));
            memcpy(shared_bytes + copy.target, copy.source, static_cast<size_t>(copy.read));
            const uint32_t end = (copy.target + copy.bytes) / GRANULE;
            for (uint32_t i = copy.target / GRANULE; i < end; ++i) {
                block->granules[i].landing = 0;
                note_write(block->granules[i]);
            }
        }
        thread->groups.erase(thread->groups.begin());
    }
}

// The sum of an MMA on a tensor core, as measured on an H200, by mma.sync and wgmma alike: each
// term loses what is below a quarter of the last bit of a float as large as the largest term, and
// their sum what does not fit in a float.
float truncated_sum(const double (&terms)[17]) {
    double largest = 0.0, sum = 0.0;
    for (const double term : terms) {
        largest = std::max(largest, std::fabs(term));
        sum += term;
    }
    if (largest == 0.0 || !std::isfinite(sum)) return static_cast<float>(sum);
    const int unit = std::ilogb(largest) - 25;
    sum = 0.0;
    for (const double term : terms) sum += std::trunc(std::ldexp(term, -unit));
    if (sum == 0.0) return 0.0f;
    const int excess = std::max(0, std::ilogb(sum) - 23);
    return static_cast<float>(std::ldexp(std::trunc(std::ldexp(sum, -excess)), excess + unit));
}

void multiply_add_truncated(
    float (&d)[16][8], const float (&a)[16][16], const float (&b)[16][8]) {
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 8; ++column) {
            double terms[17] = {d[row][column]};
            for (int k = 0; k < 16; ++k)
                terms[k + 1] = static_cast<double>(a[row][k]) * b[k][column];
            d[row][column] = truncated_sum(terms);
        }
}

// d += a b, rounded to float once per element or, if the launch truncates, as on tensor cores.
void multiply_add(float (&d)[16][8], const float (&a)[16][16], const float (&b)[16][8]) {
    if (launch.truncates) return multiply_add_truncated(d, a, b);
    for (int row = 0; row < 16; ++row) {
        double sum[8];
        for (int column = 0; column < 8; ++column) sum[column] = d[row][column];
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column)
                sum[column] += static_cast<double>(a[row][k]) * b[k][column];
        for (int column = 0; column < 8; ++column)
            d[row][column] = static_cast<float>(sum[column]);
    }
}

}  // namespace emulator
