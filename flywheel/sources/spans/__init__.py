"""Spans of any source, and the replies that are read from them."""
