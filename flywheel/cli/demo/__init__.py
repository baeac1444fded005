"""`flywheel demo`: recorded replies and a recorded round, judged and shown."""
