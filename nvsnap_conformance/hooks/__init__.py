"""What is injected into engines, the ways in, and known-bad implementations."""
