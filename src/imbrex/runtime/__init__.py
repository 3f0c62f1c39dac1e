"""Tools for all rooms: waits with a time-out, streams, checks of arguments, tracing, deferred gradients."""

from imbrex.runtime import gradients, tracing, waits

__all__ = ["gradients", "tracing", "waits"]
