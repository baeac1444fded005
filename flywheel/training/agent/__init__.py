"""Rollouts of whole trajectories: turns of the policy, and the answers of its tools."""
