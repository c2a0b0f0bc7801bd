"""Chunked post-training losses."""
