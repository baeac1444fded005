"""`python -m flywheel` is `flywheel`."""

from flywheel.cli import main

main()
