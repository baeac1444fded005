"""Read-only queries over the state, for commands and pages."""
