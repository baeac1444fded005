"""Recorded calls of models: parsing them, and finding the conversations that they are part of."""
