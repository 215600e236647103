"""``python -m ftd`` is ``ftd``."""

from ftd.cli import main

main()
