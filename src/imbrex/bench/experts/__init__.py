"""One rank's experts measured beside torch."""
