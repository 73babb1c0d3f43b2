// What is said when a thread did what it must not. A part of engine.cpp.
#pragma once

namespace emulator {
namespace {

std::string text(Site site) {
    return std::string(site.file) + ":" + std::to_string(site.line);
}

[[noreturn]] void stop(const std::string& message) {
    fflush(stdout);
    fprintf(stderr, "%s\n", message.c_str());
    fflush(stderr);
    _exit(70);
}

std::string name_of(const Block& b, int index) {
    return "block " + std::to_string(b.index) + ", thread " + std::to_string(index) + " (warp "
         + std::to_string(index / LANES) + ", lane " + std::to_string(index % LANES) + ")";
}

[[noreturn]] void fault_at(const std::string& where, const std::string& what) {
    const std::string who = thread == nullptr ? "outside of all threads"
                                              : name_of(*block, thread->index);
    stop(who + ", " + where + ": " + what);
}

// Who waits where, equal neighbours in one line.
[[noreturn]] void report_standstill() {
    std::string message = "no thread can go on:";
    for (const auto& b : resident) {
        if (b->living == 0) continue;
        for (const auto& [address, barrier] : b->mbarriers)
            if (!barrier.waiting.empty())
                message += "\n    block " + std::to_string(b->index) + ", mbarrier at byte "
                         + std::to_string(address) + ": phase " + std::to_string(barrier.phase)
                         + " lacks " + std::to_string(barrier.missing) + " arrivals and "
                         + std::to_string(barrier.bytes) + " bytes, of which "
                         + std::to_string(barrier.loads.size()) + " copies are on their way";
        int first = 0;
        const auto state = [&](int i) {
            const Thread& t = b->threads[i];
            return t.state == State::ENDED ? std::string("has ended")
                 : "waits in " + std::string(t.operation) + " at " + text(t.site);
        };
        for (int i = 1; i <= launch.threads; ++i) {
            if (i < launch.threads && state(i) == state(first)) continue;
            message += "\n    block " + std::to_string(b->index) + ", thread "
                     + std::to_string(first)
                     + (i - 1 > first ? " to " + std::to_string(i - 1) : "") + " " + state(first);
            first = i;
        }
    }
    stop(message);
}

}  // namespace
}  // namespace emulator
