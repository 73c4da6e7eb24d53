"""The way from a model of `nn.Linear` and expert modules to one of ours, in place, and back."""
