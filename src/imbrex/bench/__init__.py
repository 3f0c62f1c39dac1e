"""Measurements of imbrex beside its rivals: shapes, routings, result files, and a folder a subject."""
