"""Tunes the agent beside it on a file of tasks, without a daemon: `python tune.py TASKS.jsonl MODEL`.

What `ingest.train_ratio` leaves of the tasks (30 of 100), and at least `gate.min_tasks` (8), is held out to compare
the adapter with the model.
"""

import sys

from agent import run

import flywheel

if __name__ == "__main__":
    result = flywheel.tune(
        run,
        {"repeat_times": 8, "batch_size": 8, "total_steps": 20, "temperature": 1.0},
        train_dataset=sys.argv[1],
        model=sys.argv[2],
    )
    print(result.reason)
    print(f"reward {result.reward_first} → {result.reward_last}; adapter: {result.adapter}")
