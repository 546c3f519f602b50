"""Targets: what is under test, one TOML file each, and the probe of what machine and target can do."""
