"""The errors that bilens raises on purpose.

Each message names the argument, what came, what was expected and what to do. The command line
prints the message alone; anything else that escapes is a bug and keeps its traceback.
"""

__all__ = ["BilensError", "CheckpointError", "DataError", "NotBilinearError"]


class BilensError(ValueError):
    """Something that the caller handed over cannot be used; the message says what and why."""


class NotBilinearError(BilensError):
    """A module was asked for its tensor and is not exactly a tensor."""


class DataError(BilensError):
    """A data set is missing, damaged or not what it claims to be."""


class CheckpointError(BilensError):
    """A saved model or run is missing, damaged or does not fit."""
