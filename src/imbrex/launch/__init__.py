"""How processes start and meet: local ranks, a network of namespaces, factors of the world."""
