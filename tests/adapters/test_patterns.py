"""Regular expressions of strangers: they mean what `re` takes them for, and none takes long."""

import re
import warnings
from random import Random

import pytest

from moefp8.adapters.patterns import Pattern, Steps

PIECES = [
    *("a", "b", ".", r"\.", "[ab]", "[^a.]", "[a-b]", r"[\d-]", r"\d", r"\w", "1", "ab"),
    *("^", "$", r"\b", r"\B", r"\Z", "(", "(?:", "(?=", "(?!", ")", ")", ")", "|", "|"),
    *("*", "+", "?", "*?", "{2}", "{1,2}", "{2,}", "{0}", "{,2}", "{3,1}"),
]
NAMES = [
    *("model.layers.0.self_attn.q_proj", "model.layers.10.mlp.gate_proj", "lm_head", "model"),
    *("model.layers.1.mlp.experts.gate_up_proj", "vision.layers.0.mlp.gate", "layers.0", ""),
]
PUBLISHED = [
    *("q_proj", "model.layers.0.self_attn.q_proj", r"^model\.layers\.0\.self_attn\.q_proj"),
    *(r".*\.q_proj", r".*\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", "(q_proj|k_proj)", "lm_head$"),
    *(r"layers\.(0|1|10)\..*", r".*mlp.gate$", r"^(?!.*vision).*(?:gate|q_proj).*", ".*lm_head"),
    *(r"^(model(?=\.).*\.(gate_proj|q_proj))$", r"model\.layers\.[0-9]+\.mlp.*", "vision.*"),
    *(r".*\.layers\.[0-1]\.(?:self_attn\.q|mlp\.gate)(_proj)?", ".*mlp.experts.*(gate|up).*"),
    "|".join(re.escape(f"model.layers.{i}.self_attn.q_proj") for i in range(300)),
]
HOSTILE = [
    *("(a+)+x", "(a|a)*x", "(a|aa)+x", f"{'a?' * 60}{'a' * 60}x", f"{'(a|a)' * 60}x", ".*" * 50),
    *("((a*)*)*x", "(((.*)*.*)*.*)*x", "(?:(?:(?=(a+)+x)a)*a?)*x", "(.?){500}x", "(){999}x"),
]


def compared(text: str, names: list[str]) -> bool:
    """Whether both read the expression; they then must agree on each name."""
    try:
        pattern = Pattern(text, Steps(1_000_000))
        theirs = re.compile(text)
    except (ValueError, re.error):
        return False
    for name in names:
        ends, match = pattern.ends(name), theirs.match(name)
        assert bool(ends) == (match is not None), (text, name)
        assert match is None or match.end() in ends, (text, name)
        assert (len(name) in ends) == (theirs.fullmatch(name) is not None), (text, name)
    return True


def test_patterns_mean_what_re_takes_them_for():
    random = Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what later releases of Python take otherwise
        num_compared = 0
        for _ in range(6000):
            text = "".join(random.choices(PIECES, k=random.randint(1, 8)))
            names = ["".join(random.choices("ab.1", k=random.randint(0, 6))) for _ in range(4)]
            num_compared += compared(text, [*names, "ab\n"])
    assert num_compared > 1000


@pytest.mark.parametrize("text", PUBLISHED)
def test_patterns_as_people_publish_them_match(text):
    assert compared(text, NAMES)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_patterns_take_few_steps(text):
    steps = Steps(1_000_000)
    pattern = Pattern(text, steps)
    steps.left = 100_000
    assert bool(pattern.ends("a" * 60)) == (text == ".*" * 50)
    assert pattern.ends("a" * 60 + "x") or text == "(){999}x"


def test_steps_are_of_all_patterns_together():
    text = "(((((a?){99}){99}){99}){99}){99}x"
    with pytest.raises(TimeoutError, match="takes more than 100,000 steps"):
        Pattern(text, Steps(100_000)).ends("a" * 60)
    steps = Steps(10_000)
    patterns = [Pattern(".*x", steps) for _ in range(40)]
    with pytest.raises(TimeoutError):
        [pattern.ends("a" * 60) for pattern in patterns]
    with pytest.raises(TimeoutError):
        Pattern("a" * 1_000_000, Steps(10_000))


@pytest.mark.parametrize(
    "text",
    [
        *("(", ")", "a)(b", "*a", "a**", "a*+", "a{3,2}", "a{99999}", "[a", "[]", "[z-a]", "\\"),
        *(r"(a)\1", "(?i)a", "(?P<a>a)", "(?<=a)b", "(?>a)", r"\x41", "[[a]", "[a--b]", "a{"),
        *("(" * 10_000, "(" * 500 + ")" * 500),
    ],
)
def test_other_patterns_are_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        Pattern(text, Steps(10_000_000))
