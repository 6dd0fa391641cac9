"""Owns the metadata of every block in every tier: one writer of reference counts, so no race."""
