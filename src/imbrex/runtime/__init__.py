"""What every room may use: bounded waits, streams, checks of arguments, tracing, deferred gradients."""
