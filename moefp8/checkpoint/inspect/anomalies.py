"""An anomaly is what an inspection has to tell of all tensors that share it.

Severities: "error" where load_checkpoint would refuse, "note" where it loads as it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import printable

NUM_EXAMPLES = 3


@dataclass(frozen=True)
class Anomaly:
    """rule: what is wrong; kind: the folded name of the tensors, or a file.

    count: how many tensors, or problems in a file; examples: the first few, with key and file.
    num_values, of_values: how many of how many values are at fault; 0 if no values are.
    """

    severity: str
    rule: str
    kind: str
    examples: tuple[str, ...]
    count: int = 1
    num_values: int = 0
    of_values: int = 0


def fold(anomalies: Iterable[Anomaly]) -> tuple[Anomaly, ...]:
    """Return one anomaly for each severity, rule and kind, errors first; counts are sums."""
    found: dict[tuple[str, str, str], Anomaly] = {}
    for new in anomalies:
        place = new.severity, new.rule, new.kind
        found[place] = _sum(found[place], new) if place in found else new
    shown = (replace(x, examples=tuple(map(printable, x.examples))) for x in found.values())
    return tuple(sorted(shown, key=lambda anomaly: anomaly.severity))


def _sum(a: Anomaly, b: Anomaly) -> Anomaly:
    return replace(
        a,
        examples=(*a.examples, *b.examples)[:NUM_EXAMPLES],
        count=a.count + b.count,
        num_values=a.num_values + b.num_values,
        of_values=a.of_values + b.of_values,
    )
