"""The GPU of the machine that runs the tests, if it has one."""


def find_gpu():
    """Return (the GPU's name or None, why there is none)."""
    try:
        import cupy

        runtime = cupy.cuda.runtime
        runtime.getDeviceCount()
        name = runtime.getDeviceProperties(0)["name"].decode()
        return name, ""
    except Exception as error:  # no CuPy, no driver, no device: all mean none
        return None, str(error).partition("\n")[0]


GPU, WHY_NO_GPU = find_gpu()
