"""From a model with `nn.Linear` and expert modules to one with ours, in place, and back."""
