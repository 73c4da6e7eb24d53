"""Errors of functions, with the options of a command in place of keywords."""

import argparse
import re
from collections.abc import Sequence


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options that it takes, without dashes in front."""
    return re.findall(r"--([a-z][a-z-]*)", parser.format_usage())


def with_options(text: str, options: Sequence[str]) -> str:
    """Name options as the command line has them where an error has a function's keywords.

    A keyword of one word may be any word, so it counts only where errors name an argument: before
    "must", for instance.
    """
    for option in options:
        keyword = option.replace("-", "_")
        if "_" in keyword:
            text = re.sub(rf"(?<![\w./-]){keyword}\b(?![./]\w)=?", f"--{option}", text)
        else:
            before, after = r"(?:^|(?<=[:;,] )|(?<=another ))", r"(?= must\b|: | '| it\b|,? than)"
            text = re.sub(before + keyword + after, f"--{option}", text)
    return text
