"""What training reads and writes: rollouts, samples, groups, prompts and the files of a round."""
