"""The call log: what the server records of model calls, and how it is read."""
