"""Filters: what users put before the judge, as a chain in YAML."""
