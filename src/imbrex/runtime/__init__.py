"""Tools for all rooms: waits with a time-out, streams, checks of arguments, tracing, deferred gradients."""

from imbrex.runtime import gradients, problems, tracing, waits

__all__ = ["gradients", "problems", "tracing", "waits"]
