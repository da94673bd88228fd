"""`python -m luthier` is the command `luthier`."""

from .common.cli import main

main()
