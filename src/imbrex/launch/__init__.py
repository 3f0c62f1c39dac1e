"""How the processes of a run start and find each other: local ranks, emulated networks, and how ranks are
divided."""
