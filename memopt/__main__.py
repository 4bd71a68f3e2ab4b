"""`python -m memopt`, and `torchrun … -m memopt`: the command line."""

from __future__ import annotations

from memopt.cli.main import main

main()
