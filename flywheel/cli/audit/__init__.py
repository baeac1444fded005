"""`flywheel audit`: every reply is counted once, and the task file agrees with the state."""
