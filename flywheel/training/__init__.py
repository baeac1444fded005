"""A round's training: vLLM rollout engines and a TRL trainer as Ray actors, and the data between them.

The grading function is passed in: this package does not know the judge, the rubric or the store.
"""
