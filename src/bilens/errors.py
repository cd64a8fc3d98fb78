"""The errors that bilens raises on purpose.

Each message names the argument, its value, the expected value and a remedy. The command line
prints only the message. Any other exception is a bug and keeps its traceback.
"""


class BilensError(ValueError):
    """An argument, a file or a model that cannot be used; the message names it and says why."""


class NotBilinearError(BilensError):
    """A module that is not exactly a tensor, asked for its tensor."""


class DataError(BilensError):
    """A data set that is missing, damaged or of another format than its name says."""


class CheckpointError(BilensError):
    """A saved model or run that is missing, damaged or does not fit."""


def is_panic(error: BaseException) -> bool:
    """Return True for a panic of Rust, which is no Exception, and whose class has no home."""
    return type(error).__name__ == "PanicException"
