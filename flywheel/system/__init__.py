"""Operating system and network: files, processes, logs, terminals, HTTP, and users' code in child processes."""
