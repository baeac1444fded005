"""What attackers sent, as corpora. These tests need the base installation, pytest and hypothesis alone."""
