"""How much of the device's state ``prepare`` takes down: all of it, or less on request, for an experiment.

The option ``teardown`` of the reference hooks is a table from a kind of state to what becomes of it. What is
left alive on request is reported with the outcome ``kept``, which is no success.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvsnap_hooks.errors import BadOption

CHOICES = {
    "nccl": ("destroyed", "suspended", "live"),
    "custom-allreduce": ("closed", "closed-by-engine", "live"),
    "flashinfer-workspace": ("freed", "live"),
    "cuda-graphs": ("dropped", "kept"),
}
"""What may become of each kind of state; the first of each is the default."""


@dataclass(frozen=True)
class Teardown:
    """What becomes of each kind of state that only a device holds."""

    nccl: str = "destroyed"
    custom_allreduce: str = "closed"
    flashinfer_workspace: str = "freed"
    cuda_graphs: str = "dropped"

    @classmethod
    def of(cls, option: Any) -> Teardown:
        """Read the option; raise :class:`BadOption` where it is not one of :data:`CHOICES`."""
        if option is None:
            return cls()
        if not isinstance(option, dict):
            raise BadOption(f"teardown is a table, not {option!r}")
        for name, choice in option.items():
            if name not in CHOICES:
                raise BadOption(f"teardown knows no {name!r}; it knows {', '.join(CHOICES)}")
            if choice not in CHOICES[name]:
                raise BadOption(f"teardown of {name} is one of {', '.join(CHOICES[name])}, not {choice!r}")
        return cls(**{name.replace("-", "_"): choice for name, choice in option.items()})
