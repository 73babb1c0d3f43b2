"""The version, which setup.cfg reads too, without an import."""

__version__ = "0.1.0"
