"""The model that a checkpoint fills: its tensors, and what it remembers of its last load."""
