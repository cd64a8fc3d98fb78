"""Scripts for work on bilens itself; no part of the package."""
