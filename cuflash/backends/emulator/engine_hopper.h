// Hopper's instructions: mbarriers, bulk copies (which land at the wait for them) and wgmma (which
// runs at its wait). A part of engine.cpp.
#pragma once

namespace emulator {

namespace {

constexpr int SWIZZLED_ROW_BYTES = 128;

// 128-byte swizzle: the 16-byte chunk of an address is mixed with the row that it is in.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// ---- Publishing epochs ----

// The running thread's warp adds its own epoch, and those that it has acquired, to `published`;
// then it begins a new epoch.
void publish_epochs(std::vector<uint32_t>& published) {
    const int w = thread->index / LANES, n = block->num_warps();
    published.resize(n);
    for (int v = 0; v < n; ++v) published[v] = std::max(published[v], block->acquired[w * n + v]);
    published[w] = std::max(published[w], block->epoch[w]);
    ++block->epoch[w];
}

void acquire_epochs(const std::vector<uint32_t>& published, int warp) {
    const int n = block->num_warps();
    for (size_t v = 0; v < published.size(); ++v)
        block->acquired[warp * n + v] = std::max(block->acquired[warp * n + v], published[v]);
}

// ---- mbarriers ----

// `address`: an offset in shared_bytes, here and below; threads' addresses are those of a cluster.
Mbarrier& mbarrier_at(uint32_t address, Site site) {
    const auto found = block->mbarriers.find(address);
    if (found == block->mbarriers.end())
        fault(site, "no mbarrier has been initialised at byte %u of shared memory", address);
    // Initialisation is a write to shared memory and must be ordered before this use.
    const Granule& g = block->granules[address / GRANULE];
    if (!write_is_ordered(g))
        fault(site, "uses the %s, which %s has initialised without a barrier in between",
              name_of_mbarrier(*block, address).c_str(), other_thread(g.writer).c_str());
    return found->second;
}

// A row of a box: its position in the box and in the array, and how much of it exists.
struct BoxRow { int from; unsigned char* array; int bytes; };

template <class F> void for_each_row(const TensorMap& map, const int (&at)[4], const F& f) {
    const auto left = [&](int axis, int64_t index) {        // elements from there to the end
        return std::max<int64_t>(static_cast<int64_t>(map.sizes[axis]) - index, 0);
    };
    for (int row = 0; row < static_cast<int>(map.box[1]); ++row) {
        const int64_t token = int64_t{at[1]} + row;
        const bool inside = left(1, token) > 0 && left(2, at[2]) > 0 && left(3, at[3]) > 0;
        const int64_t columns = inside ? std::min<int64_t>(left(0, at[0]), map.box[0]) : 0;
        f(BoxRow{row * static_cast<int>(map.box[0]) * 2,
                 map.address + int64_t{at[0]} * 2
                     + token * static_cast<int64_t>(map.strides[0])
                     + at[2] * static_cast<int64_t>(map.strides[1])
                     + at[3] * static_cast<int64_t>(map.strides[2]),
                 static_cast<int>(columns) * 2});
    }
}

int box_bytes(const TensorMap& map) { return static_cast<int>(map.box[0] * map.box[1]) * 2; }

int bytes_of(const BulkLoad& load) { return load.map ? box_bytes(*load.map) : load.bytes; }

const TensorMap& checked_map(const void* pointer, const int (&at)[4], uint32_t shared, Site site) {
    const auto& map = *static_cast<const TensorMap*>(pointer);
    if (map.box[0] * 2 != SWIZZLED_ROW_BYTES || map.box[2] != 1 || map.box[3] != 1)
        fault(site, "a box of %u x %u x %u x %u elements, expected rows of 64 of one head",
              map.box[0], map.box[1], map.box[2], map.box[3]);
    if (shared % 1024 != 0)
        fault(site, "byte %u of shared memory is not aligned to 1024 bytes, the period of the "
              "128-byte swizzle", shared);
    for (int index : at)
        if (index < 0)                                      // seen on an H200: illegal instruction
            fault(site, "a box at (%d, %d, %d, %d), before the tensor's start", at[0], at[1],
                  at[2], at[3]);
    return map;
}

void land(Mbarrier& barrier) {
    for (const BulkLoad& load : barrier.loads) {
        const int warp = load.thread / LANES;
        const auto write = [&](uint32_t to, const unsigned char* from) {     // null: zeros
            if (from != nullptr) memcpy(shared_bytes + to, from, 2);
            else memset(shared_bytes + to, 0, 2);
            Granule& g = block->granules[to / GRANULE];
            g.landing = g.unfenced = 0;
            g.written_in = block->run;
            g.writer = static_cast<uint16_t>(load.thread);
            g.write_epoch = block->epoch[warp];
            g.write_syncs = 0;                              // the mbarrier orders lanes too
        };
        if (!load.map)
            for (int i = 0; i < load.bytes; i += 2) {
                write(load.target + i, load.source + i);
                const auto from = load.source + i - shared_bytes;   // another block's?
                if (from >= 0 && from < launch.shared) block->granules[from / GRANULE].leaving = 0;
            }
        else
            for_each_row(*load.map, load.at, [&](const BoxRow& row) {
                for (int i = 0; i < SWIZZLED_ROW_BYTES; i += 2)
                    write(swizzled(load.target + row.from + i),
                          i < row.bytes ? row.array + i : nullptr);
            });
        barrier.bytes -= bytes_of(load);
        barrier.published.resize(block->num_warps());
        barrier.published[warp] = std::max(barrier.published[warp], block->epoch[warp]);
        ++block->epoch[warp];
    }
    barrier.loads.clear();
}

// Ends the phase if nothing is missing: at once, or an arrival on the wrong stage would show only
// if a thread waited for it. Copies land when a thread waits and only bytes are missing.
void end_phase(Mbarrier& barrier) {
    if (barrier.missing > 0) return;
    if (!barrier.loads.empty() && barrier.waiting.empty()) return;
    int64_t bytes = 0;
    for (const BulkLoad& load : barrier.loads) bytes += bytes_of(load);
    if (bytes != barrier.bytes) return;
    land(barrier);
    ++barrier.phase;
    barrier.missing = barrier.expected;
    barrier.acquired.swap(barrier.published);
    barrier.published.assign(block->num_warps(), 0);
    for (int waiting : barrier.waiting) make_ready(block->threads[waiting]);
    barrier.waiting.clear();
    idle_turns = 0;
}

}  // namespace

void mbarrier_init(uint32_t address, int arrivals, Site site) {
    shared_memory(address, 8, 8, Access::WRITE, site);
    address = offset_of(address);
    if (arrivals < 1) fault(site, "an mbarrier of %d arrivals", arrivals);
    Mbarrier barrier{};
    barrier.expected = barrier.missing = arrivals;
    barrier.published.assign(block->num_warps(), 0);
    barrier.acquired = barrier.published;
    block->mbarriers[address] = barrier;
}

void fence_mbarrier_init() {
    for (auto& [address, barrier] : block->mbarriers)
        if (block->granules[address / GRANULE].writer == thread->index) barrier.fenced = true;
}

void mbarrier_arrive(uint32_t address, int bytes, Site site) {
    check_reachable(address, site);
    address = offset_of(address);
    Mbarrier& barrier = mbarrier_at(address, site);
    if (barrier.missing == 0) {
        // The phase has all its arrivals and only bytes are in flight: they land now.
        barrier.waiting.push_back(thread->index);
        end_phase(barrier);
        barrier.waiting.clear();
        if (barrier.missing == 0)
            fault(site, "arrives at the %s, which has all %d arrivals of its phase and waits "
                  "for %lld bytes", name_of_mbarrier(*block, address).c_str(), barrier.expected,
                  static_cast<long long>(barrier.bytes));
    }
    barrier.bytes += bytes;
    --barrier.missing;
    publish_epochs(barrier.published);
    end_phase(barrier);
}

bool mbarrier_try_wait(uint32_t address, uint32_t parity, Site site) {
    check_own(address, site);
    address = offset_of(address);
    Mbarrier* barrier = &mbarrier_at(address, site);
    if (barrier->phase % 2 == parity) {
        if (draw(4) == 0) return false;                     // try_wait may time out
        barrier->waiting.push_back(thread->index);
        note_wait("mbarrier.try_wait", site, Awaited::MBARRIER, address);
        end_phase(*barrier);                                // makes it ready
        leave();
        barrier = &mbarrier_at(address, site);
    }
    if (barrier->phase % 2 == parity) return false;
    acquire_epochs(barrier->acquired, thread->index / LANES);
    return true;
}

// ---- Named barriers ----

void named_barrier(int id, int threads, bool wait, Site site) {
    if (launch.cluster > 1) fault(site, "named barriers of clusters are not modelled");
    if (id < 1 || id > 15) fault(site, "barrier %d, expected 1 to 15", id);
    if (threads % LANES != 0) fault(site, "a barrier of %d threads, not a multiple of 32", threads);
    NamedBarrier& barrier = block->named_barriers[id];
    if (barrier.arrived > 0 && barrier.threads != threads)
        fault(site, "arrives at barrier %d for %d threads, others for %d", id, threads,
              barrier.threads);
    barrier.threads = threads;
    barrier.origin = {site, __builtin_return_address(0)};
    publish_epochs(barrier.published);
    if (wait) barrier.waiting.push_back(thread->index);
    if (++barrier.arrived < threads) {
        if (wait) wait_in("bar.sync", site, Awaited::NAMED_BARRIER, static_cast<uint64_t>(id));
        return;
    }
    in_engine = true;
    idle_turns = 0;
    std::vector<bool> warps(block->num_warps());
    for (int waiting : barrier.waiting) {
        warps[waiting / LANES] = true;
        make_ready(block->threads[waiting]);
    }
    for (int w = 0; w < block->num_warps(); ++w)
        if (warps[w]) {
            acquire_epochs(barrier.published, w);
            ++block->syncs[w];
        }
    barrier = {};
    if (wait) {
        // The last thread to arrive waits to be scheduled like the others.
        make_ready((thread->state = State::WAITS, *thread));
        leave();
    }
    in_engine = false;
}

// ---- setmaxnreg ----

namespace {

Warp& own_warp() { return block->warps[thread->index / LANES]; }

}  // namespace

void set_registers(int count, bool more, Site site) {
    struct Change { int count; bool more; Origin origin; };
    Change change{count, more, {site, __builtin_return_address(0)}};
    meet("setmaxnreg", WHOLE_WARP, &change, [](void* const (&lanes)[32]) {
        const Change& own = *static_cast<const Change*>(lanes[0]);
        Warp& warp = own_warp();
        if (own.more ? own.count < warp.registers : own.count > warp.registers)
            fault(own.origin.site, "%s registers: from %d to %d", own.more ? "takes" : "gives",
                  warp.registers, own.count);
        warp.registers = own.count;
        if (own.more) block->registers = own.origin;
    }, site);
}

// ---- Checks when a block's last thread ends ----

namespace {

// A block's shared memory ends with its last thread.
void check_copies_have_landed() {
    const int rank = rank_in_cluster();
    if (launch.cluster == 1 ? block->living > 1 : !has_ended(rank)) return;
    const auto is_own = [&](int64_t offset) {
        return offset >= int64_t{rank} * launch.block_shared
            && offset < int64_t{rank + 1} * launch.block_shared;
    };
    for (const auto& [address, barrier] : block->mbarriers)
        for (const BulkLoad& load : barrier.loads) {
            const bool into = is_own(load.target);
            if (into || (!load.map && is_own(load.source - shared_bytes)))
                fault(load.origin, "block %d ends while a copy %s its shared memory is in flight",
                      block_of(*block, thread->index), into ? "to" : "from");
        }
}

void check_end_of_block() {
    // On a GPU, setmaxnreg.inc waits for ever if other warps have not released enough registers.
    int registers = 0;
    for (const Warp& warp : block->warps) registers += warp.registers * LANES;
    const int most = registers_at_start() * block->num_warps() * LANES;
    if (registers > most)
        fault(block->registers, "the warps need %d registers, but the block has %d",
              registers, most);
    // Every arrival at a named barrier must be part of a completed barrier.
    for (int id = 1; id < 16; ++id) {
        const NamedBarrier& barrier = block->named_barriers[id];
        if (barrier.arrived > 0)
            fault(barrier.origin, "barrier %d has %d of its %d threads when the block ends", id,
                  barrier.arrived, barrier.threads);
    }
}

}  // namespace

// ---- Bulk copies ----

void fence_async_proxy() { ++thread->proxy_fences; }

namespace {

Mbarrier& fenced_mbarrier_at(uint32_t address, Site site) {
    Mbarrier& barrier = mbarrier_at(address, site);
    if (!barrier.fenced)
        fault(site, "TMA may not see the %s yet: its initialisation was not fenced",
              name_of_mbarrier(*block, address).c_str());
    return barrier;
}

// Marks 16 bytes of shared memory that no thread may access until a bulk copy has landed.
void expect_chunk(uint32_t to, int rank, Site site) {
    check_shared(to, 16, Access::WRITE, [&] { return here(site); }, false, rank);
    memset(shared_bytes + to, 0xFF, 16);
    for (uint32_t g = to / GRANULE; g < (to + 16) / GRANULE; ++g)
        block->granules[g].landing = static_cast<uint16_t>(thread->index + 1);
}

void begin_load(uint32_t target, const void* pointer, uint32_t address, const int (&at)[4],
                Origin origin) {
    const Site site = origin.site;
    check_reachable(target, site);
    const int rank = rank_of(target);
    target = offset_of(target);
    address = offset_of(address);
    const TensorMap& map = checked_map(pointer, at, target, site);
    Mbarrier& barrier = fenced_mbarrier_at(address, site);
    for_each_row(map, at, [&](const BoxRow& row) {
        if (row.bytes > 0) check_global(row.array, row.bytes, 1, Access::READ, site);
        for (int i = 0; i < SWIZZLED_ROW_BYTES; i += 16)
            expect_chunk(swizzled(target + row.from + i), rank, site);
    });
    barrier.loads.push_back(
        {target, map, {at[0], at[1], at[2], at[3]}, thread->index, origin, nullptr, 0});
    end_phase(barrier);
}

}  // namespace

void load_box(uint32_t target, const void* map, uint32_t barrier, const int (&at)[4], Site site) {
    begin_load(target, map, barrier, at, {site, __builtin_return_address(0)});
}

void load_box_of_blocks(uint32_t target, const void* map, uint32_t barrier, uint32_t blocks,
                        const int (&at)[4], Site site) {
    for (int rank = 0; rank < launch.cluster; ++rank)
        if (blocks >> rank & 1)
            begin_load(shared_of_rank(target, rank), map, shared_of_rank(barrier, rank), at,
                       {site, __builtin_return_address(0)});
}

namespace {

void check_bulk(const void* array, uint32_t shared, int bytes, Access access, Site site) {
    if (bytes <= 0 || bytes % 16 != 0)
        fault(site, "a bulk copy of %d bytes, expected a multiple of 16", bytes);
    check_global(array, bytes, 16, access, site);
    check_alignment(shared, 16, [&] { return here(site); });
}

}  // namespace

void load_bytes(uint32_t target, const void* source, uint32_t address, int bytes, Site site) {
    check_reachable(target, site);
    const int rank = rank_of(target);
    target = offset_of(target);
    address = offset_of(address);
    check_bulk(source, target, bytes, Access::READ, site);
    Mbarrier& barrier = fenced_mbarrier_at(address, site);
    for (int i = 0; i < bytes; i += 16) expect_chunk(target + i, rank, site);
    barrier.loads.push_back({target, std::nullopt, {}, thread->index,
                             {site, __builtin_return_address(0)},
                             static_cast<const unsigned char*>(source), bytes});
    end_phase(barrier);
}

void copy_shared(uint32_t target, uint32_t source, uint32_t address, int bytes, Site site) {
    check_own(source, site);
    check_reachable(target, site);
    const int rank = rank_of(target);
    target = offset_of(target);
    source = offset_of(source);
    address = offset_of(address);
    const auto where = [&] { return here(site); };
    if (bytes <= 0 || bytes % 16 != 0)
        fault(site, "a bulk copy of %d bytes, expected a multiple of 16", bytes);
    check_alignment(source, 16, where);
    check_alignment(target, 16, where);
    Mbarrier& barrier = fenced_mbarrier_at(address, site);
    check_shared(source, bytes, Access::READ, where, true);
    for (int i = 0; i < bytes; i += GRANULE)
        block->granules[(source + i) / GRANULE].leaving = static_cast<uint16_t>(thread->index + 1);
    for (int i = 0; i < bytes; i += 16) expect_chunk(target + i, rank, site);
    barrier.loads.push_back({target, std::nullopt, {}, thread->index,
                             {site, __builtin_return_address(0)},
                             shared_bytes + source, bytes});
    end_phase(barrier);
}

void store_box(const void* pointer, uint32_t source, const int (&at)[4], Site site) {
    check_own(source, site);
    source = offset_of(source);
    const TensorMap& map = checked_map(pointer, at, source, site);
    const auto where = [&] { return here(site); };
    for_each_row(map, at, [&](const BoxRow& row) {
        if (row.bytes > 0) check_global(row.array, row.bytes, 1, Access::WRITE, site);
        for (int i = 0; i < SWIZZLED_ROW_BYTES; i += 2) {
            const uint32_t at_byte = swizzled(source + row.from + i);
            if (i < row.bytes) check_shared(at_byte, 2, Access::READ, where, true);
            block->granules[at_byte / GRANULE].leaving = static_cast<uint16_t>(thread->index + 1);
        }
    });
    thread->stores.push_back({source, map, {at[0], at[1], at[2], at[3]},
                              {site, __builtin_return_address(0)}});
}

namespace {

[[gnu::always_inline]] inline void send_in_bulk(
    void* target, uint32_t source, int bytes, Arrives arrives, Site site) {
    check_own(source, site);
    source = offset_of(source);
    check_bulk(target, source, bytes, Access::WRITE, site);
    check_shared(source, bytes, Access::READ, [&] { return here(site); }, true);
    for (int i = 0; i < bytes; i += GRANULE)
        block->granules[(source + i) / GRANULE].leaving = static_cast<uint16_t>(thread->index + 1);
    thread->stores.push_back(
        {source, std::nullopt, {}, {site, __builtin_return_address(0)}, false, {},
         static_cast<unsigned char*>(target), bytes, arrives});
}

}  // namespace

void store_bytes(void* target, uint32_t source, int bytes, Site site) {
    send_in_bulk(target, source, bytes, Arrives::COPIED, site);
}

void add_floats(float* target, uint32_t source, int bytes, Site site) {
    send_in_bulk(target, source, bytes, Arrives::ADDED_FLOATS, site);
}

void add_ints(int* target, uint32_t source, int bytes, Site site) {
    send_in_bulk(target, source, bytes, Arrives::ADDED_INTS, site);
}

void commit_stores() {
    thread->store_groups.push_back(std::move(thread->stores));
    thread->stores.clear();
}

namespace {

void read_source(BulkStore& store) {
    if (store.read) return;
    store.read = true;
    const auto read = [&](uint32_t at_byte, bool inside) {
        if (inside)
            store.bytes.insert(store.bytes.end(), shared_bytes + at_byte,
                               shared_bytes + at_byte + 2);
        block->granules[at_byte / GRANULE].leaving = 0;
        note_reads(at_byte / GRANULE, at_byte / GRANULE + 1);
    };
    if (!store.map)
        for (int i = 0; i < store.count; i += 2) read(store.source + i, true);
    else
        for_each_row(*store.map, store.at, [&](const BoxRow& row) {
            for (int i = 0; i < SWIZZLED_ROW_BYTES; i += 2)
                read(swizzled(store.source + row.from + i), i < row.bytes);
        });
}

template <class T> void add_element(unsigned char* target, const unsigned char* from) {
    T x;
    memcpy(&x, from, sizeof x);
    *reinterpret_cast<T*>(target) += x;
}

void write_target(const BulkStore& store) {
    const unsigned char* from = store.bytes.data();
    if (!store.map) {
        for (int i = 0; i < store.count; i += static_cast<int>(sizeof(float)))
            switch (store.arrives) {
                case Arrives::COPIED: memcpy(store.target + i, from + i, sizeof(float)); break;
                case Arrives::ADDED_FLOATS: add_element<float>(store.target + i, from + i); break;
                case Arrives::ADDED_INTS: add_element<uint32_t>(store.target + i, from + i); break;
            }
        return;
    }
    for_each_row(*store.map, store.at, [&](const BoxRow& row) {
        if (row.bytes <= 0) return;
        memcpy(row.array, from, row.bytes);
        from += row.bytes;
    });
}

}  // namespace

// A store reads shared memory as late as possible: at the wait for its read. It writes as late,
// too.
void read_stores(int pending) {
    const int count = static_cast<int>(thread->store_groups.size()) - pending;
    for (int i = 0; i < count; ++i)
        for (BulkStore& store : thread->store_groups[i]) read_source(store);
}

void write_stores(int pending) {
    read_stores(pending);
    while (static_cast<int>(thread->store_groups.size()) > pending) {
        for (const BulkStore& store : thread->store_groups.front()) write_target(store);
        thread->store_groups.erase(thread->store_groups.begin());
    }
}

namespace {

// A block's shared memory may be reused once its threads have ended.
void check_end() {
    const BulkStore* unread = thread->stores.empty() ? nullptr : &thread->stores.front();
    for (const auto& group : thread->store_groups)
        for (const BulkStore& store : group)
            if (!store.read) unread = &store;
    if (unread != nullptr)
        fault(unread->origin, "the thread ends while this bulk store may still read shared memory");
    write_stores(0);
}

// ---- wgmma ----

struct Descriptor {
    uint32_t start, panel, group;                           // bytes
    explicit Descriptor(uint64_t bits)
        : start((static_cast<uint32_t>(bits & 0x3FFF) << 4) + first_byte_of_block()),
          panel(static_cast<uint32_t>(bits >> 16 & 0x3FFF) << 4),
          group(static_cast<uint32_t>(bits >> 32 & 0x3FFF) << 4) {}
    // K-major: `line` counts rows of A or columns of B, `step` runs along the sum.
    uint32_t contiguous_sum(int line, int step) const {
        return swizzled(start + line / 8 * group + line % 8 * 128 + step * 2);
    }
    // MN-major: `line` is contiguous, in panels of 64.
    uint32_t contiguous_lines(int line, int step) const {
        return swizzled(start + line / 64 * panel + step / 8 * group + step % 8 * 128
                        + line % 64 * 2);
    }
};

void check_swizzle(uint64_t descriptor) {
    if (descriptor >> 46 != uint64_t{1} << 16)
        fault(thread->wgmma.site, "the matrix descriptor %#llx has no 128-byte swizzle",
              static_cast<unsigned long long>(descriptor));
}

uint32_t address_in_b(const Wgmma& p, const Descriptor& b, int step, int column) {
    return p.b_rows_contiguous ? b.contiguous_lines(column, step) : b.contiguous_sum(column, step);
}

uint32_t address_in_a(const Wgmma& p, const Descriptor& a, int step, int row_of_warp) {
    const int row = thread->index / LANES % 4 * 16 + row_of_warp;
    return p.a_columns_contiguous ? a.contiguous_lines(row, step) : a.contiguous_sum(row, step);
}

void check_operands(const Wgmma& p) {
    const auto check = [&](uint32_t address) {              // 16 bytes, as they lie in a row
        check_shared(address, 16, Access::READ_BY_WGMMA, [&] { return here(p.origin); }, true);
    };
    const Descriptor a(p.a), b(p.b);
    const int columns = p.d->count * 2;
    if (p.b_rows_contiguous) {
        for (int step = 0; step < 16; ++step)
            for (int column = 0; column < columns; column += 8)
                check(b.contiguous_lines(column, step));
    } else {
        for (int column = 0; column < columns; ++column)
            for (int step = 0; step < 16; step += 8) check(b.contiguous_sum(column, step));
    }
    if (p.a_registers[0] != nullptr) return;
    // All of the warpgroup's rows: PTX does not promise that a warp reads only its own.
    if (p.a_columns_contiguous) {
        for (int step = 0; step < 16; ++step)
            for (int row = 0; row < 64; row += 8) check(a.contiguous_lines(row, step));
    } else {
        for (int row = 0; row < 64; ++row)
            for (int step = 0; step < 16; step += 8) check(a.contiguous_sum(row, step));
    }
}

void run_wgmma(const Wgmma& p) {
    check_operands(p);
    const Descriptor a(p.a), b(p.b);
    const auto element = [&](uint32_t address) {
        uint16_t bits;
        memcpy(&bits, shared_bytes + address, 2);
        return p.to_float(bits);
    };
    float rows[16][16];
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < 8; ++i) {                       // as the A fragments of mma_16x8x16
            const int row = lane / 4 + i / 2 % 2 * 8, step = lane % 4 * 2 + i % 2 + i / 4 * 8;
            const uint32_t* own = p.a_registers[lane];
            rows[row][step] = own == nullptr
                ? element(address_in_a(p, a, step, row))
                : p.to_float(static_cast<uint16_t>(own[i / 2] >> i % 2 * 16));
            rows[row][step] *= static_cast<float>(p.sign);
        }
    for (int tile = 0; tile < p.d->count / 4; ++tile) {
        float d[16][8], columns[16][8];
        const auto at = [&](int lane, int i) -> float& {
            return p.d->values[lane * p.d->count + tile * 4 + i];
        };
        for (int step = 0; step < 16; ++step)
            for (int column = 0; column < 8; ++column)
                columns[step][column] = element(address_in_b(p, b, step, tile * 8 + column));
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i)
                d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = p.accumulate ? at(lane, i) : 0.0f;
        multiply_add(d, rows, columns);
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i)
                at(lane, i) = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

void issue(void* const (&lanes)[32]) {
    const auto operands = [&](int lane) -> const WgmmaOperands& {
        return *static_cast<const WgmmaOperands*>(lanes[lane]);
    };
    const WgmmaOperands& first = operands(0);
    Warp& warp = own_warp();
    Wgmma p{};
    for (const auto& d : warp.accumulators)
        if (d->registers[0] == first.d) p.d = d;
    if (p.d == nullptr) {
        p.d = std::make_shared<Accumulator>();
        p.d->count = first.count;
        p.d->values.resize(LANES * first.count);
        for (int lane = 0; lane < LANES; ++lane) {
            p.d->registers[lane] = operands(lane).d;
            memcpy(&p.d->values[lane * first.count], operands(lane).d, first.count * sizeof(float));
        }
        warp.accumulators.push_back(p.d);
    }
    ++p.d->pending;
    for (int lane = 0; lane < LANES; ++lane) {
        memset(operands(lane).d, 0xFF, first.count * sizeof(float));
        p.a_registers[lane] = operands(lane).a_registers;
    }
    p.a = first.a;
    p.b = first.b;
    p.accumulate = first.accumulate;
    p.a_columns_contiguous = first.a_columns_contiguous;
    p.b_rows_contiguous = first.b_rows_contiguous;
    p.sign = first.sign;
    p.to_float = first.to_float;
    p.origin = thread->wgmma;
    check_swizzle(p.b);
    if (p.a_registers[0] == nullptr) check_swizzle(p.a);
    check_operands(p);
    warp.wgmmas.push_back(p);
}

// Whether the running thread accesses registers of a wgmma in flight: it may not access an
// accumulator or overwrite A. Null if it does neither.
const char* register_in_use(const unsigned char* p, int bytes, Access access) {
    const int lane = thread->index % LANES;
    const auto among = [&](const void* registers, size_t count) {
        const auto* first = static_cast<const unsigned char*>(registers);
        return first != nullptr && p + bytes > first && p < first + count * sizeof(float);
    };
    const auto are_operands = [&](const std::vector<Wgmma>& wgmmas) {
        return std::any_of(wgmmas.begin(), wgmmas.end(), [&](const Wgmma& wgmma) {
            return among(wgmma.a_registers[lane], 4);
        });
    };
    const Warp& warp = own_warp();
    for (const auto& d : warp.accumulators)
        if (among(d->registers[lane], static_cast<size_t>(d->count))) return "the accumulator";
    if (access != Access::WRITE) return nullptr;
    const auto& groups = warp.wgmma_groups;
    const bool used = are_operands(warp.wgmmas)
                   || std::any_of(groups.begin(), groups.end(), are_operands);
    return used ? "an operand" : nullptr;
}

}  // namespace

void fence_wgmmas(Site site) {
    meet("wgmma.fence", WHOLE_WARP, nullptr,
         [](void* const (&)[32]) { own_warp().fenced = true; }, site);
}

void start_wgmma(WgmmaOperands& operands, Site site) {
    if (!own_warp().fenced)
        fault(site, "wgmma without wgmma.fence since the last wait: registers may not be there "
              "yet");
    thread->wgmma = {site, __builtin_return_address(0)};
    meet("wgmma.mma_async", WHOLE_WARP, &operands, issue, site);
}

void commit_wgmmas(Site site) {
    meet("wgmma.commit_group", WHOLE_WARP, nullptr, [](void* const (&)[32]) {
        Warp& warp = own_warp();
        warp.wgmma_groups.push_back(std::move(warp.wgmmas));
        warp.wgmmas.clear();
    }, site);
}

void wait_for_wgmmas(int pending, Site site) {
    struct Wait { int pending; } wait{pending};
    meet("wgmma.wait_group", WHOLE_WARP, &wait, [](void* const (&lanes)[32]) {
        Warp& warp = own_warp();
        warp.fenced = false;
        const auto most = static_cast<size_t>(static_cast<const Wait*>(lanes[0])->pending);
        while (warp.wgmma_groups.size() > most) {
            for (const Wgmma& p : warp.wgmma_groups.front()) {
                run_wgmma(p);
                if (--p.d->pending > 0) continue;
                for (int lane = 0; lane < LANES; ++lane)
                    memcpy(p.d->registers[lane], &p.d->values[lane * p.d->count],
                           p.d->count * sizeof(float));
                auto& all = warp.accumulators;
                all.erase(std::find(all.begin(), all.end(), p.d));
            }
            warp.wgmma_groups.erase(warp.wgmma_groups.begin());
        }
    }, site);
}

}  // namespace emulator
