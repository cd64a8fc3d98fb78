"""The command, also as `python -m bilens`, which torchrun needs."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run one command; ctrl-C is not an error while what it needs is imported, either."""
    try:
        from bilens.cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
