"""Rollouts of agents with tools, answered from recorded results."""
