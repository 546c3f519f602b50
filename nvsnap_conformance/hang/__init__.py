"""The rank verdict: who hangs, where, and whose collective is missing. External to the victim."""
