"""The state database: its schema, opening it, and writing to it."""
