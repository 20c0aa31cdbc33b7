"""Why we are slower where we are: patterns of "device stage case", and the cause found by profiling."""

CAUSES: dict[str, str] = {}
