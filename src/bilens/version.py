"""The version of the package, which the command line and Spaces name."""

__version__ = "0.3.0"
