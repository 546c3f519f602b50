"""The run record and its renderings."""
