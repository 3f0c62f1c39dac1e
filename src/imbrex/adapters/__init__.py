"""Adapters by which other libraries' programs and models use imbrex."""
