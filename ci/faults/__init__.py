"""Faults with requests running, many times each: `python ci/faults --help`."""
