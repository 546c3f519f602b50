"""Clauses: the named requirements, one TOML file per area, and their registry."""
