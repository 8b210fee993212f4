"""``python -m perfbook`` is the ``perfbook`` command."""

from perfbook.cli import main

main()
