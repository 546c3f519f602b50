"""Makes the checkout's own packages (tests, benchmarks) importable; the plugin does the rest."""
