"""An anomaly is a finding of an inspection, for all tensors that share it.

Severities: "error" if load_checkpoint would refuse it, "note" if it would load it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import printable

NUM_EXAMPLES = 3


@dataclass(frozen=True)
class Anomaly:
    """rule: what is wrong; kind: the folded name of the tensors, or a file.

    count: how many tensors, or problems in a file; examples: the first few, with key and file.
    num_values, of_values: the number of values at fault, and of all values; 0 if none are.
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
    sums: dict[tuple[str, str, str], Anomaly] = {}
    for new in anomalies:
        place = new.severity, new.rule, new.kind
        sums[place] = _sum(sums[place], new) if place in sums else new
    shown = (replace(x, examples=tuple(map(printable, x.examples))) for x in sums.values())
    return tuple(sorted(shown, key=lambda anomaly: anomaly.severity))


def _sum(a: Anomaly, b: Anomaly) -> Anomaly:
    return replace(
        a,
        examples=(*a.examples, *b.examples)[:NUM_EXAMPLES],
        count=a.count + b.count,
        num_values=a.num_values + b.num_values,
        of_values=a.of_values + b.of_values,
    )
