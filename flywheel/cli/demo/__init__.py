"""`flywheel demo`: the loop on shipped replies, and its judge."""
