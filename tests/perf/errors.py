"""The one error of the comparison: a figure that cannot be had, or could not be believed."""


class PerfError(Exception):
    """Printed as it is; the run ends with a non-zero status."""
