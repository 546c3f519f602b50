"""Planted hangs: synthetic bundles, and real ranks that are stuck on purpose."""
