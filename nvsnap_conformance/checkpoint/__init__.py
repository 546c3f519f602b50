"""Checkpointers: device layer and host layer, one file per strategy."""
