"""The version of the library, of which that of the package is made."""

__version__ = "0.5.0"
