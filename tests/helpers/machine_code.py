"""The instructions in a compiled kernel."""

import struct

from cuflash.build import nvrtc


def instructions(kernel, arch):
    """Return the bytes of a planned kernel's code, compiled for `arch`."""
    cubin, _ = nvrtc._compile(kernel, arch)
    return _code_section(cubin, kernel.entry)


def _code_section(cubin, entry):
    """Return the .text section of an ELF file."""
    (first,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [
        struct.unpack_from("<2I4Q", cubin, first + i * size)
        for i in range(count)
    ]
    names = sections[of_names][4]
    for name, _, _, _, start, length in sections:
        end = cubin.index(b"\0", names + name)
        if cubin[names + name : end] == f".text.{entry}".encode():
            return cubin[start : start + length]
    raise LookupError(entry)
