"""The parts of scripts/build_docs.py."""
