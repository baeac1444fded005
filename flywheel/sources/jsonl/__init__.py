"""Task files that other programs write, one JSON object per line: read, never written."""
