"""The optimizer's side of a round: GRPO, its steps and the held-out evaluation."""
