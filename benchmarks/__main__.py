"""Runs one benchmark: ``python -m benchmarks NAME [OPTIONS]``; ``--json`` prints one JSON object last."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path


def names() -> dict[str, str]:
    """Return the benchmarks and the first line of what each says of itself."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        module = importlib.import_module(f"benchmarks.{path.stem}")
        if hasattr(module, "run"):
            found[path.stem] = (module.__doc__ or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Run the benchmark that ``arguments`` name; exits 1 when it says that its own bounds do not hold."""
    known = names()
    listing = "\n".join(f"  {name:<14} {line}" for name, line in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Benchmarks of the suite itself:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(known))
    module = (
        importlib.import_module(f"benchmarks.{arguments[0]}")
        if arguments[:1] and arguments[0] in known
        else None
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    if module is not None:
        module.add_arguments(parser)
    asked = parser.parse_args(arguments)
    assert module is not None  # argparse has refused any other name
    result = {
        "benchmark": asked.name,
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "load_before": os.getloadavg()[0],
        **module.run(asked),
    }
    if asked.json:
        print(json.dumps(result), flush=True)
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
