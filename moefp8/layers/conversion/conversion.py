"""What a conversion swaps, what it leaves, and why."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_MAX_PATTERNS = 12

SKIPPED, NOT_IN_ONLY, LEFT_OUT = "skipped", "not in only", "left out by filter_fn"
ASKED_FOR = (SKIPPED, NOT_IN_ONLY, LEFT_OUT)
OTHER_MAKE = "experts of another make"

_BY_HAND = (
    "If they are SwiGLU experts, put GroupedExperts.from_weights in their place, with their stacks "
    "[E, 2I, H], gate rows first, and [E, H, I]"
)
_BY_TRANSFORMERS = (
    'if they are transformers\' own, import moefp8.hf and try experts_implementation="moefp8" of '
    "from_pretrained"
)


@dataclass(frozen=True)
class Conversion:
    """swapped: name -> kind ("linear", "Conv1D", "experts"); kept: name -> why it stays.

    Names are those of the model before `convert`. kept holds all its other linears and experts that
    are not FP8 already. experts: names in kept that are experts. trainable: names in swapped whose
    weights are kept as master weights. one_by_one: name of a list of experts whose
    linears are swapped one by one -> why, and how to run them at once. loose: name of a matrix that
    no linear, experts or other known module holds -> its holder and shape, if such matrices are
    most of the weights besides embeddings; loose_share: how much of these weights they are.
    """

    swapped: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    experts: Collection[str] = ()
    trainable: Collection[str] = ()
    one_by_one: Mapping[str, str] = field(default_factory=dict)
    loose: Mapping[str, str] = field(default_factory=dict)
    loose_share: float = 0.0

    def warning(self) -> str | None:
        """A warning if nothing became FP8, or if experts or most weights did not; else None."""
        experts = {name: why for name, why in self.kept.items() if name in self.experts}
        unasked = {name: why for name, why in experts.items() if why not in ASKED_FOR}
        is_of_other_make = any(why.startswith(OTHER_MAKE) for why in unasked.values())
        way_out = f". {_BY_HAND}; {_BY_TRANSFORMERS}" if is_of_other_make else ""
        sentences = []
        if not self.swapped:
            reasons = "; ".join(_counted(self.kept)) or "there are neither linears nor experts"
            sentences = [f"nothing becomes FP8: {reasons}{way_out}"]
        elif unasked:
            sentences = [f"experts stay in 16 bits: {'; '.join(_counted(unasked))}{way_out}"]
        if self.loose:
            matrices = "; ".join(_counted(self.loose))
            sentences.append(
                f"{100 * self.loose_share:.0f} % of the weights besides embeddings stay as they "
                f"are, as no linear or experts module holds them: {matrices}. {_BY_HAND}"
            )
        if self.one_by_one:
            sentences += [
                f"experts run one by one: {x}" for x in _counted(self.one_by_one, "{} {}")
            ]
        return "\n".join(sentences) or None

    def __str__(self) -> str:
        kinds = [Counter[str](), Counter[str]()]
        for name, kind in self.swapped.items():
            kinds[name in self.trainable][kind] += 1
        lines = [
            f"{form}: {', '.join(f'{n} {_plural(kind, n)}' for kind, n in counts.items())}"
            for form, counts in zip(("FP8", "FP8 of master weights"), kinds, strict=True)
            if counts
        ]
        lines = lines or ["FP8: none"]
        lines += [f"one by one: {x}" for x in _counted(self.one_by_one, "{} {}")]
        stays = (*_counted(self.kept), *_counted(self.loose))
        return "\n".join([*lines, *(f"stays: {x}" for x in stays)])


def _plural(kind: str, count: int) -> str:
    return kind if kind == "experts" or count == 1 else f"{kind}s"


def _counted(reasons: Mapping[str, str], form: str = "{} ({})") -> Iterator[str]:
    """One text for all modules with the same pattern and reason."""
    groups = Counter((pattern_of(name), why) for name, why in reasons.items())
    for (pattern, why), count in groups.most_common(_MAX_PATTERNS):
        yield form.format(f"{count} {pattern or 'the model itself'}", why)
    if len(groups) > _MAX_PATTERNS:
        yield f"and {len(groups) - _MAX_PATTERNS} patterns more"


def pattern_of(name: str) -> str:
    """`model.layers.*.mlp.experts`: one pattern for the same module of all layers."""
    return _NUMBER.sub("*", name)
