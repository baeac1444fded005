"""The operating system and the network: child processes, and HTTP clients and servers with limits."""
