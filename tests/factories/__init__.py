"""Constructors of what tests need, by noun; every value has a default that keywords override."""
