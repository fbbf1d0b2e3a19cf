"""``python -m chatlearn_cli`` is ``chatlearn``."""

from chatlearn_cli.main import main

main()
