"""What Flywheel needs of the operating system and the network: tested with real processes and sockets."""
