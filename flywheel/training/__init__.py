"""A round's training: vLLM rollout engines and a TRL trainer as Ray actors, and what passes between them.

Grades come in as a callable: this package knows no judge, no rubric and no store.
"""
