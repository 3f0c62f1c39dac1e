"""The layer measured beside its rivals, whole and by phase."""
