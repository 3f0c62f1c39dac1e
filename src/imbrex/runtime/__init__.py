"""Tools for every room: bounded waits, streams, checks of arguments, tracing, deferred gradients."""

from imbrex.runtime import gradients, tracing, waits

__all__ = ["gradients", "tracing", "waits"]
