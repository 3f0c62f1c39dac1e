"""Tools for every room: bounded waits, streams, checks of arguments, tracing, deferred gradients."""
