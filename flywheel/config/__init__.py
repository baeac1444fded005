"""The configuration: sections by subject, and the file that holds them all."""
