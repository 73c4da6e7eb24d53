"""The GEMMs of Hopper GPUs: device code, configs, heuristic, what was tuned, descriptions."""
