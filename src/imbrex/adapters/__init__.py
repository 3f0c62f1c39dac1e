"""Other people's doors."""
