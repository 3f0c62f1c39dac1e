"""Attention of single tokens over a static cache."""
