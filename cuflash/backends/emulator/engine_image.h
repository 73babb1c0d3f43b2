// Loads a kernel's image: an executable without libraries, which runtime.py has linked to the
// addresses of emulator_image and to the engine's functions. Linking a program for each kernel
// would take four times as long. A part of engine.cpp.
#pragma once
#include "library.h"

constexpr size_t MOST_IMAGE_BYTES = 16 << 20;
extern "C" {
alignas(64 << 10) unsigned char emulator_image[MOST_IMAGE_BYTES];       // of the largest pages

// What the compiler calls in kernels. runtime.py leaves out the prefix.
#define EMULATED_1(T, f) T emulated_##f(T x) { return f(x); }
#define EMULATED_2(T, f) T emulated_##f(T x, T y) { return f(x, y); }
#define EMULATED_FLOAT(f) EMULATED_1(float, f)
#define EMULATED_FLOATS(f) EMULATED_2(float, f)
#define EMULATED_DOUBLE(f) EMULATED_1(double, f)
#define EMULATED_DOUBLES(f) EMULATED_2(double, f)
EMULATOR_OF_FLOAT(EMULATED_FLOAT)
EMULATOR_OF_FLOATS(EMULATED_FLOATS)
EMULATOR_OF_DOUBLE(EMULATED_DOUBLE)
EMULATOR_OF_DOUBLES(EMULATED_DOUBLES)
float emulated_fmaf(float x, float y, float z) { return fmaf(x, y, z); }
double emulated_fma(double x, double y, double z) { return fma(x, y, z); }
void emulated_sincosf(float x, float* s, float* c) { sincosf(x, s, c); }
void emulated_sincos(double x, double* s, double* c) { sincos(x, s, c); }
void* emulated_memcpy(void* to, const void* from, size_t n) { return memcpy(to, from, n); }
void* emulated_memmove(void* to, const void* from, size_t n) { return memmove(to, from, n); }
void* emulated_memset(void* to, int byte, size_t n) { return memset(to, byte, n); }
int emulated_memcmp(const void* a, const void* b, size_t n) { return memcmp(a, b, n); }
[[noreturn]] void emulated_abort() { abort(); }

void __register_frame(const void* frames);                  // of libgcc
}

namespace emulator {
namespace {

// What an image begins with.
struct Image {
    void (*entry)(const void* argument);
    const void* frames;                                     // for traces of return addresses
    void (**first)(), (**end)();                            // to be called before it is run
};

template <class T> T read_at(int file, uint64_t offset) {
    T found;
    if (pread(file, &found, sizeof found, static_cast<off_t>(offset)) != sizeof found)
        fail("the kernel's image");
    return found;
}

void load_image(const char* path) {
    const int file = open(path, O_RDONLY);
    if (file < 0) fail(path);
    const auto header = read_at<Elf64_Ehdr>(file, 0);
    for (int i = 0; i < header.e_phnum; ++i) {
        const auto part = read_at<Elf64_Phdr>(file, header.e_phoff + sizeof(Elf64_Phdr) * i);
        if (part.p_type != PT_LOAD || part.p_filesz == 0) continue;
        const auto* at = reinterpret_cast<unsigned char*>(part.p_vaddr);
        if (at < emulator_image || at + part.p_filesz > emulator_image + MOST_IMAGE_BYTES)
            fail("the kernel's image is too large");
        const int protection = PROT_READ | (part.p_flags & PF_W ? PROT_WRITE : PROT_EXEC);
        if (mmap(reinterpret_cast<void*>(part.p_vaddr), part.p_filesz, protection,
                 MAP_PRIVATE | MAP_FIXED, file, static_cast<off_t>(part.p_offset)) == MAP_FAILED)
            fail(path);
    }
    close(file);
    const auto& image = *reinterpret_cast<const Image*>(emulator_image);
    __register_frame(image.frames);
    for (auto function = image.first; function != image.end; ++function) (*function)();
    entry = image.entry;
}

}  // namespace
}  // namespace emulator
