"""Structures of the driver, declared as in C."""


def fields(*members: tuple[type, str]) -> list[tuple[str, type]]:
    """`_fields_` of a ctypes structure: a type, and the names of the members that have it."""
    return [(name, kind) for kind, names in members for name in names.split()]
