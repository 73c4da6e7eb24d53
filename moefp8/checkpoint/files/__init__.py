"""A checkpoint on disk: locate, open, check, read and write its files."""
