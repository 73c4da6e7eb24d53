"""The model that a checkpoint fills: its tensors, its names in transformers, and its last load."""
