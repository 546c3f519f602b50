"""Experiments: questions about checkpoint/restore that are answered by comparing arms, not by clauses."""
