"""Rubrics: what a good reply is, as weighted criteria, and how their choices become a score."""
