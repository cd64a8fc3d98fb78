"""`python -m bilens`, which torchrun needs."""

from bilens.cli import main

if __name__ == "__main__":
    main()
