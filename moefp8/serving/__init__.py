"""Plug-ins that let serving engines run their FP8 layers on moefp8."""
