"""Faults that are put into the library, one at a time, and the test of behaviour that sees each.

    python -m tests.faults [--only NAME] [--jobs N]

The golden file of launches (`tests/launches`) differs after any change, so it proves nothing about
a fault. Each fault of the catalogue (`catalogue/`, a file for each room) names another test, which
must fail. Where none does, a test is missing.
"""
