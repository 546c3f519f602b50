"""Engines under test: one protocol, one file per engine family."""
