"""A checkpoint on disk: how its files are found, opened, read with care, and written."""
