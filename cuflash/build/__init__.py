"""From a planned kernel to machine code: source text, NVRTC, cache."""
