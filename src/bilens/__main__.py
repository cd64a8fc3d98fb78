"""Entry point of the command `bilens`, and of `python -m bilens`, which torchrun needs."""

import sys


def main() -> None:
    """Run one command; exit with status 130 on ctrl-C, during imports too."""
    try:
        from bilens.cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
