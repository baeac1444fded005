"""`make demo-real`: a support desk, whose small model learns from a large one's replies and then improves by itself.

Its agent reads a customer's message and answers with a JSON object of five fields.
"""
