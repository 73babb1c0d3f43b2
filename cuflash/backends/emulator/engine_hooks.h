// Functions that the compiler calls: before each access of the kernel to memory that is not
// provably private to a thread (ThreadSanitizer's interface), and where an index is out of bounds
// (UndefinedBehaviorSanitizer's). A part of engine.cpp.
#pragma once

namespace emulator {
namespace {

extern "C" char __executable_start, end;

// Checks an access of the kernel to memory that may not be private to the thread. `caller` is the
// return address.
[[gnu::noinline]] void check_all(
    const unsigned char* p, int bytes, int alignment, Access access, void* caller) {
    const auto where = [caller] { return trace_from(caller); };
    if (p >= thread->stack && p + bytes <= thread->stack + STACK_BYTES) {
        const char* used = register_in_use(p, bytes, access);
        if (used == nullptr) return;
        fault_at(where(), std::string(access == Access::WRITE ? "writes " : "reads ") + used
                 + " of a wgmma that it has not waited for");
    }
    const auto address = reinterpret_cast<uint64_t>(p);
    if (p >= emulator_shared && p < shared_bytes + MOST_SHARED_BYTES) {
        check_alignment(address, alignment, where);
        return check_shared(p - shared_bytes, bytes, access, where);
    }
    if (p >= reinterpret_cast<unsigned char*>(&__executable_start)
        && p < reinterpret_cast<unsigned char*>(&end)) return;      // constants, threadIdx
    if (p >= launch.arguments && p < launch.arguments + 4096) return;
    check_alignment(address, alignment, where);
    check_array(address, bytes, access, where);
}

// Most accesses are to the thread's own stack, which nobody watches but for wgmmas in flight.
inline void check(
    const void* pointer, int bytes, int alignment, Access access, void* caller) {
    if (in_engine) return;
    const auto* p = static_cast<const unsigned char*>(pointer);
    if (p >= thread->stack && p + bytes <= thread->stack + STACK_BYTES
        && Accumulator::in_flight == 0) return;
    check_all(p, bytes, alignment, access, caller);
}

}  // namespace

}  // namespace emulator

// ---- What the compiler calls (ThreadSanitizer's interface) ----

#define EMULATOR_CHECK(name, bytes, alignment, access)                               \
    extern "C" void name(void* p) {                                                  \
        emulator::check(p, bytes, alignment, emulator::Access::access,               \
                        __builtin_return_address(0));                                \
    }
#define EMULATOR_CHECKS(bytes)                                            \
    EMULATOR_CHECK(__tsan_read##bytes, bytes, bytes, READ)                \
    EMULATOR_CHECK(__tsan_write##bytes, bytes, bytes, WRITE)              \
    EMULATOR_CHECK(__tsan_volatile_read##bytes, bytes, bytes, READ)       \
    EMULATOR_CHECK(__tsan_volatile_write##bytes, bytes, bytes, WRITE)     \
    EMULATOR_CHECK(__tsan_unaligned_read##bytes, bytes, 1, READ)          \
    EMULATOR_CHECK(__tsan_unaligned_write##bytes, bytes, 1, WRITE)
EMULATOR_CHECKS(1)
EMULATOR_CHECKS(2)
EMULATOR_CHECKS(4)
EMULATOR_CHECKS(8)
EMULATOR_CHECKS(16)

extern "C" void __tsan_read_range(void* p, long bytes) {
    emulator::check(p, static_cast<int>(bytes), 1, emulator::Access::READ,
                    __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* p, long bytes) {
    emulator::check(p, static_cast<int>(bytes), 1, emulator::Access::WRITE,
                    __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// ---- What the compiler calls (UndefinedBehaviorSanitizer's interface) ----

namespace {

struct Place { const char* file; uint32_t line, column; };
struct Type { uint16_t kind, information; char name[1]; };
struct Bounds { Place place; const Type* array; const Type* index; };

}  // namespace

extern "C" void __ubsan_handle_out_of_bounds(const Bounds* about, void* index) {
    emulator::fault({about->place.file, static_cast<int>(about->place.line)},
                    "index %lld is out of the bounds of an array %s",
                    static_cast<long long>(reinterpret_cast<intptr_t>(index)), about->array->name);
}
