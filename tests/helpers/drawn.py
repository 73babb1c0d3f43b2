"""Tests of what Hypothesis draws, on every backend."""

import inspect

import pytest
from hypothesis import example, given, settings

from . import tried
from .backends import BACKENDS

# By profile and backend, where fewer: an emulated one compiles some four
# kernels, a second of work; on NumPy arrays one takes a tenth of a second.
EXAMPLES = {
    "quick": {"emulated": 2, "numpy": 4},
    "ci": {"emulated": 4},
}


def num_examples(backend):
    """How many calls are drawn for a backend in the current profile."""
    fewer = EXAMPLES.get(settings.get_current_profile_name(), {})
    return fewer.get(backend.name, settings().max_examples)


def on_each_backend(
    make, *, backends=BACKENDS, each=None, examples=(), **options
):
    """Run a test on drawn cases, which differ by backend.

    The test is called as ``test(backend, case)``. A failure prints the line
    ``case=Case(...)``; add that case to `examples` to repeat and keep it.

    Parameters
    ----------
    make : function
        Maps a backend and options to a strategy for `case`.
    backends : list of pytest.param, optional
    each : dict of str to list, optional
        Options of `make`, with a test for each value.
    examples : list of Case
        Former failures, run in every test that they fit.
    **options
        Options of `make` that are the same in all tests.
    """
    each = each or {}

    def decorate(check):
        def test(backend, **chosen):
            def on_case(case):
                tried.PLANNED.clear()
                check(backend, case)
                tried.note(case)

            on_case.__name__ = check.__name__
            # Distinguishes functions of the same text, as Hypothesis's plugin
            # does for pytest's parameters.
            which = check.__module__, check.__name__, backend.name, chosen
            on_case._hypothesis_internal_add_digest = repr(which).encode()
            run = given(case=make(backend, **options, **chosen))(on_case)
            run = settings(max_examples=num_examples(backend))(run)
            for kept in examples:
                fits = (getattr(kept, k) == v for k, v in chosen.items())
                if all(fits):
                    run = example(case=kept)(run)
            run()

        names = ["backend", *each]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind) for name in names]
        )
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(check, name))
        for name, values in each.items():
            test = pytest.mark.parametrize(name, values)(test)
        test = pytest.mark.parametrize("backend", backends)(test)
        return pytest.mark.drawn(test)

    return decorate
