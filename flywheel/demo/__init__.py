"""What `flywheel demo` shows: 100 replies of an agent that answers sums, and a judge that is a script."""
