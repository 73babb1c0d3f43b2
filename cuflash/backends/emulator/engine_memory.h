// Checks memory accesses: bounds, alignment, initialisation, and whether a barrier orders
// conflicting accesses. A part of engine.cpp.
#pragma once

namespace emulator {
namespace {

// A barrier of the whole block: each warp acquires the epochs of all others and begins a new one.
void order_block() {
    Block& b = *block;
    const int n = b.num_warps();
    for (int w = 0; w < n; ++w)
        for (int v = 0; v < n; ++v) b.acquired[w * n + v] = b.epoch[v];
    for (int w = 0; w < n; ++w) ++b.epoch[w], ++b.syncs[w];
}

bool write_is_ordered(const Granule& g, Access access = Access::READ) {
    const int w = thread->index / LANES, v = g.writer / LANES;
    if (v == w)
        return g.write_syncs < block->syncs[w]
            || (g.writer == thread->index && (access == Access::READ || access == Access::WRITE));
    return g.write_epoch <= block->acquired[w * block->num_warps() + v];
}

// The first warp whose last read of granules [first, end) is not ordered before the running
// thread's access; -1 if there is none.
int unordered_reader(int64_t first, int64_t end) {
    const int w = thread->index / LANES, n = block->num_warps();
    const auto own_lane = static_cast<unsigned>(thread->index % LANES);
    for (int v = 0; v < n; ++v) {
        const Read* reads = block->reads_of(v);
        if (v != w) {
            const uint32_t acquired = block->acquired[w * n + v];
            for (int64_t i = first; i < end; ++i)
                if (reads[i].epoch() > acquired) return v;
        } else {
            for (int64_t i = first; i < end; ++i)
                if (reads[i].epoch() != 0 && reads[i].syncs() == block->syncs[w]
                    && reads[i].lane() != own_lane) return v;
        }
    }
    return -1;
}

void note_reads(int64_t first, int64_t end, Access access = Access::READ) {
    const int w = thread->index / LANES;
    const auto lane = static_cast<unsigned>(thread->index % LANES);
    const uint32_t epoch = block->epoch[w], syncs = block->syncs[w];
    Read* reads = block->reads_of(w);
    const auto is_now = [&](Read r) { return r.epoch() != 0 && r.syncs() == syncs; };
    if (access == Access::READ_BY_WGMMA) {
        // The reads of a wgmma are noted when the whole warp has waited for it, so no lane has any
        // left.
        for (int64_t i = first; i < end; ++i) {
            const Read r = reads[i];
            reads[i] = Read(epoch, is_now(r) ? syncs : syncs - 1, r.lane());
        }
        return;
    }
    const Read of_lane(epoch, syncs, lane), of_several(epoch, syncs, SEVERAL);
    const bool by_warp = access == Access::READ_BY_WARP;
    for (int64_t i = first; i < end; ++i) {
        const Read r = reads[i];
        reads[i] = by_warp || (is_now(r) && r.lane() != lane) ? of_several : of_lane;
    }
}

void note_write(Granule& g) {
    g.written_in = block->run;
    g.write_epoch = block->epoch[thread->index / LANES];
    g.write_syncs = block->syncs[thread->index / LANES];
    g.unfenced = static_cast<uint16_t>(1 + thread->proxy_fences);
    g.writer = static_cast<uint16_t>(thread->index);
}

std::string bytes_at(Access access, int bytes, int64_t offset) {
    return std::string(access == Access::WRITE ? "writes " : "reads ") + std::to_string(bytes)
         + (bytes == 1 ? " byte" : " bytes") + " at byte " + std::to_string(offset);
}

constexpr int OWN_BLOCK = -1;

// `by_proxy`: the access is made by TMA or wgmma (the async proxy), which sees a thread's writes
// only after that thread's fence. `rank`: of the block whose shared memory it is.
template <class Where>
void check_shared(int64_t offset, int bytes, Access access, const Where& where,
                  bool by_proxy = false, int rank = OWN_BLOCK) {
    if (launch.cluster == 1) rank = 0;
    else if (rank == OWN_BLOCK) rank = rank_in_cluster();
    const int64_t of_block = offset - int64_t{rank} * launch.block_shared;
    const auto what = [&] { return bytes_at(access, bytes, of_block) + " of shared memory"; };
    if (of_block < 0 || of_block + bytes > launch.own_shared)
        fault_at(where(), what() + ", which has " + std::to_string(launch.own_shared));
    const int64_t first = offset / GRANULE, end = (offset + bytes - 1) / GRANULE + 1;
    const Granule* before = nullptr;
    for (int64_t i = first; i < end; ++i) {
        const Granule& g = block->granules[i];
        const bool checked = before != nullptr && memcmp(before, &g, sizeof g) == 0;
        before = &g;
        if (checked) continue;                              // most equal their neighbour
        if (g.landing != 0)
            fault_at(where(), what() + ", where a copy of " + other_thread(g.landing - 1)
                     + " is in flight that it has not waited for");
        const bool written = g.written_in == block->run;
        if (access != Access::WRITE && !written)
            fault_at(where(), what() + ", which no thread of the block has written");
        if (written && !write_is_ordered(g, access))
            fault_at(where(), what() + ", which " + other_thread(g.writer)
                     + " has written without a barrier in between");
        if (by_proxy && access != Access::WRITE && g.unfenced != 0
            && g.unfenced == 1 + block->threads[g.writer].proxy_fences)
            fault_at(where(), what() + ", which " + other_thread(g.writer)
                     + " has written without fence.proxy.async");
        if (access == Access::WRITE && g.leaving != 0)
            fault_at(where(), what() + ", which a bulk store of "
                     + other_thread(g.leaving - 1) + " may still read");
    }
    if (access != Access::WRITE) return note_reads(first, end, access);
    const int reader = unordered_reader(first, end);
    if (reader >= 0)
        fault_at(where(), what() + ", which " + other_warp(reader)
                 + " has read without a barrier in between");
    for (int64_t i = first; i < end; ++i) note_write(block->granules[i]);
}

template <class Where>
void check_array(uint64_t address, int bytes, Access access, const Where& where) {
    const uint64_t i = (address - FIRST_ADDRESS + ADDRESS_SPAN / 2) / ADDRESS_SPAN;   // the nearest
    if (address < FIRST_ADDRESS - ADDRESS_SPAN / 2 || i >= launch.arrays.size()) {
        char number[32];
        snprintf(number, sizeof number, "%#llx", static_cast<unsigned long long>(address));
        fault_at(where(), std::string(access == Access::READ ? "reads" : "writes") + " at address "
                 + number + ", which belongs to no array");
    }
    const Array& array = launch.arrays[i];
    const auto offset = static_cast<int64_t>(
        address - reinterpret_cast<uint64_t>(array.bytes));
    const auto what = [&] { return bytes_at(access, bytes, offset) + " of " + array.name; };
    if (offset < 0 || static_cast<uint64_t>(offset) + bytes > array.size)
        fault_at(where(), what() + ", which has " + std::to_string(array.size));
    if (access == Access::WRITE && !array.writable)
        fault_at(where(), what() + ", which is an input");
    if (array.mask != nullptr && memchr(array.mask + offset, 0, bytes) != nullptr)
        fault_at(where(), what() + ", in a gap between its rows");
}

template <class Where>
void check_alignment(uint64_t address, int alignment, const Where& where) {
    if (address % alignment == 0) return;
    char number[32];
    snprintf(number, sizeof number, "%#llx", static_cast<unsigned long long>(address));
    fault_at(where(), std::string("address ") + number + " is not aligned to "
             + std::to_string(alignment) + " bytes");
}

}  // namespace
}  // namespace emulator
