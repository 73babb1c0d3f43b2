"""From a planned kernel to machine code: text, NVRTC, files that are kept."""
