// Messages: illegal operations, and deadlocks. A location is a file and a line, followed by `pc:`
// and program addresses. faults.py replaces the addresses by the lines from which the location was
// inlined or called. A part of engine.cpp.
#pragma once

namespace emulator {
namespace {

// The running thread's return addresses, innermost first, from `first` (all if it is null) to the
// kernel's entry.
[[gnu::cold, gnu::noinline]] std::string trace_from(const void* first) {
    struct Walk { std::string words; const void* awaited; int left; } walk{"", first, 64};
    _Unwind_Backtrace([](_Unwind_Context* context, void* data) {
        auto& w = *static_cast<Walk*>(data);
        const auto address = reinterpret_cast<const void*>(_Unwind_GetIP(context));
        if (w.awaited == address) w.awaited = nullptr;
        if (w.awaited == nullptr) {
            char number[32];
            snprintf(number, sizeof number, "%s%p", w.words.empty() ? "pc:" : ",", address);
            w.words += number;
        }
        const auto last = reinterpret_cast<uintptr_t>(entry);
        return --w.left == 0 || _Unwind_GetRegionStart(context) == last ? _URC_END_OF_STACK
                                                                        : _URC_NO_REASON;
    }, &walk);
    return walk.words;
}

std::string trace() { return trace_from(nullptr); }

// Runs in a thread that report_standstill resumes.
void report_trace() {
    thread->trace = trace();
    emulator_switch(&thread->stack_pointer, scheduler_stack);
}

[[gnu::cold]] std::string text(Site site) {
    return std::string(site.file) + ":" + std::to_string(site.line);
}

// The same with addresses: the running thread's current ones, or the recorded one.
[[gnu::cold]] std::string here(Site site) { return text(site) + " " + trace(); }

[[gnu::cold]] std::string here(const Origin& origin) {
    char number[32];
    snprintf(number, sizeof number, " pc:%p", origin.caller);
    return text(origin.site) + number;
}

[[noreturn]] void stop(const std::string& message) {
    fflush(stdout);
    fprintf(stderr, "%s\n", message.c_str());
    fflush(stderr);
    _exit(70);
}

std::string name_of(const Block& b, int index) {
    const int own = index % launch.block_threads;
    return "block " + std::to_string(block_of(b, index)) + ", thread " + std::to_string(own)
         + " (warp " + std::to_string(own / LANES) + ", lane " + std::to_string(own % LANES) + ")";
}

// Another thread than the running one, or a warp, of the block; of a cluster, with its block.
std::string name_of_other(const char* kind, int number, int of_block) {
    const int rank = number / of_block;
    return kind + std::to_string(number % of_block) + (launch.cluster == 1 ? ""
        : " of block " + std::to_string(block->index * launch.cluster + rank));
}

std::string other_thread(int index) {
    return name_of_other("thread ", index, launch.block_threads);
}

std::string other_warp(int warp) {
    return name_of_other("warp ", warp, (launch.block_threads + LANES - 1) / LANES);
}

[[noreturn]] void fault_at(const std::string& where, const std::string& what) {
    const std::string who = thread == nullptr ? "outside of all threads"
                                              : name_of(*block, thread->index);
    stop(who + ", " + where + ": " + what);
}

// ---- Deadlock: which threads wait where, for what, and what is missing ----

// Formats numbers: "3", "0 to 31", "4, 6 to 8".
std::string listed(const std::vector<int>& numbers) {
    std::string words;
    for (size_t i = 0, end; i < numbers.size(); i = end) {
        for (end = i + 1; end < numbers.size() && numbers[end] == numbers[end - 1] + 1;) ++end;
        words += (words.empty() ? "" : ", ") + std::to_string(numbers[i]);
        if (end - i > 1) words += " to " + std::to_string(numbers[end - 1]);
    }
    return words;
}

std::string value_at(uint64_t address) {
    const uint64_t i = (address - FIRST_ADDRESS) / ADDRESS_SPAN;
    if (address < FIRST_ADDRESS || i >= launch.arrays.size()) return "a value";
    const Array& array = launch.arrays[i];
    int now;
    memcpy(&now, reinterpret_cast<const void*>(address), sizeof now);
    return "byte " + std::to_string(address - reinterpret_cast<uint64_t>(array.bytes)) + " of "
         + array.name + ", which holds " + std::to_string(now);
}

// By its offset in shared_bytes. faults.py finds the names of a block's bytes.
std::string name_of_mbarrier(const Block& b, uint64_t offset) {
    if (launch.cluster == 1) return "mbarrier at byte " + std::to_string(offset);
    const auto rank = static_cast<int>(offset / launch.block_shared);
    return "mbarrier at byte " + std::to_string(offset % launch.block_shared) + " of block "
         + std::to_string(b.index * launch.cluster + rank);
}

// What a waiting thread waits for.
std::string awaited_by(const Block& b, const Thread& t) {
    if (t.awaited == Awaited::MBARRIER) return name_of_mbarrier(b, t.awaited_at);
    if (t.awaited == Awaited::NAMED_BARRIER) return "barrier " + std::to_string(t.awaited_at);
    if (t.awaited == Awaited::VALUE) return value_at(t.awaited_at);
    const int lane = t.index % LANES;
    for (const Meeting& m : b.warps[t.index / LANES].meetings) {
        if ((m.arrived >> lane & 1) == 0) continue;
        std::vector<int> missing;
        for (int other = 0; other < LANES; ++other)
            if ((m.mask & ~m.arrived) >> other & 1) missing.push_back(other);
        return (missing.size() == 1 ? "lane " : "lanes ") + listed(missing);
    }
    return std::to_string(launch.threads - b.at_barrier) + " of " + std::to_string(launch.threads)
         + " threads";
}

std::string state_of(const Block& b, const Thread& t, bool several) {
    if (t.state == State::ENDED) return several ? "have ended" : "has ended";
    return (several ? "wait in " : "waits in ") + std::string(t.operation) + " at " + text(t.site)
         + " " + t.trace + " for " + awaited_by(b, t);
}

std::string name_of(int first, int last) {
    std::string name = first == last ? "thread " + std::to_string(first)
        : "threads " + std::to_string(first) + " to " + std::to_string(last);
    const int warp = first / LANES, last_warp = last / LANES;
    return name + (warp == last_warp ? " (warp " + std::to_string(warp) + ") "
        : " (warps " + std::to_string(warp) + " to " + std::to_string(last_warp) + ") ");
}

int bytes_of(const BulkLoad& load);

std::string lacks(const Mbarrier& barrier) {
    int64_t coming = 0;
    for (const BulkLoad& load : barrier.loads) coming += bytes_of(load);
    std::string words = "phase " + std::to_string(barrier.phase) + " lacks "
        + std::to_string(barrier.missing) + " of " + std::to_string(barrier.expected)
        + (barrier.expected == 1 ? " arrival" : " arrivals");
    if (barrier.bytes != 0 || coming != 0)
        words += "; " + std::to_string(barrier.bytes) + " bytes are expected, "
               + std::to_string(coming) + " are in flight";
    return words;
}

// Resumes each waiting thread to run report_trace.
void trace_all() {
    Thread* running = thread;
    reporting = true;
    for (const auto& b : resident)
        for (Thread& t : b->threads) {
            if (t.state == State::ENDED || t.operation[0] == '\0') continue;    // not begun
            thread = &t;
            if (thread == running) t.trace = trace();
            else emulator_switch(&scheduler_stack, t.stack_pointer);
        }
    thread = running;
}

// Adjacent threads with equal states share a line.
[[noreturn]] void report_standstill() {
    trace_all();
    std::string message = "no thread can continue:";
    for (const auto& b : resident) {
        if (b->living == 0) continue;
        const std::string of_block = (launch.cluster > 1 ? "\n    cluster " : "\n    block ")
                                   + std::to_string(b->index) + ", ";
        for (const auto& [address, barrier] : b->mbarriers)
            if (!barrier.waiting.empty())
                message += of_block + name_of_mbarrier(*b, address) + ": " + lacks(barrier);
        for (int id = 1; id < 16; ++id) {
            const NamedBarrier& barrier = b->named_barriers[id];
            if (barrier.arrived > 0)
                message += of_block + "barrier " + std::to_string(id) + ": "
                         + std::to_string(barrier.arrived) + " of "
                         + std::to_string(barrier.threads) + " threads have arrived";
        }
        const auto state = [&](int i) { return state_of(*b, b->threads[i], true); };
        for (int first = 0, end; first < launch.threads; first = end) {
            const std::string shared = state(first);
            for (end = first + 1; end < launch.threads && state(end) == shared;) ++end;
            message += of_block + name_of(first, end - 1)
                     + state_of(*b, b->threads[first], end - first > 1);
        }
    }
    stop(message);
}

}  // namespace
}  // namespace emulator
