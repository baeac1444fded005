"""What Flywheel needs of the operating system and the network, without a word about agents or training."""
