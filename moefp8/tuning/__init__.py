"""Measure configs of GEMMs on this GPU: `python -m moefp8 bench --tune`."""
