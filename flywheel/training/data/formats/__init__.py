"""The formats of `flywheel export`: one for each program that reads tasks, and tables."""
