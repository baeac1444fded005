"""The user's own agent in rollouts: a workflow function or a command, run in processes with limits."""
