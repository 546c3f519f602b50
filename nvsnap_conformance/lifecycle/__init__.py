"""The lifecycle of a checkpoint/restore: verbs, their trace, and the checks over what was observed."""
