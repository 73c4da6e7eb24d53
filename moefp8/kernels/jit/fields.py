"""Structures that the driver is given, told as C tells them."""


def fields(*members: tuple[type, str]) -> list[tuple[str, type]]:
    """`_fields_` of a ctypes structure: a type, and the names of the members that have it."""
    return [(name, kind) for kind, names in members for name in names.split()]
