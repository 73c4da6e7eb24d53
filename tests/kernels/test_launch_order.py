"""Each kernel waits for the one before it, before it lets the next one start, as its text says."""

import re

import pytest

from tests.kernels.launch_order import LET, PACKAGE, WAIT, Unclear, problems_of, text_of

SOURCES = sorted(PACKAGE.rglob("*.cu"))
KERNELS = {
    path: re.findall(r"(\w+_kernel)\(const __grid_constant__", text_of(path)) for path in SOURCES
}
# Where text cannot decide: (function, condition) that is taken to hold, why, and the code that the
# reason rests on.
ASSUMED = {
    ("fill", "waits"): (
        "It is false in a grouped GEMM whose bounds the previous kernel may still write. Then the "
        "scheduler's warp of the same CTA has waited in `prepare`, before all warps have met.",
        "waits = schedule.args->groups.bounds_ready;",
        f"if (!args.groups.bounds_ready) {WAIT}();",
    ),
}
on_each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


@on_each_source
def test_a_kernel_waits_before_it_lets_the_next_one_start(path):
    problems = problems_of(text_of(path), ASSUMED)
    assert [*problems] == KERNELS[path] != []
    assert not any(problems.values()), problems


@on_each_source
def test_the_other_order_is_refused(path):
    text = text_of(path)
    swapped = re.sub(f"{WAIT}|{LET}", lambda match: LET if match[0] == WAIT else WAIT, text)
    assert all(problems_of(swapped, ASSUMED).values())


@on_each_source
def test_a_kernel_without_a_wait_is_refused(path):
    without = text_of(path).replace(f"{WAIT}();", ";")
    assert all("it never waits" in x for x in problems_of(without, ASSUMED).values())


def test_what_is_assumed_is_needed_and_rests_on_code_that_is_there():
    text = text_of(PACKAGE / "kernels" / "gemm" / "sm90" / "gemm.cu")
    assert problems_of(text) == {"gemm_kernel": {"fill lets the next kernel start before it waits"}}
    assert all(code in text for _, *codes in ASSUMED.values() for code in codes)


def test_kernels_wait_and_let_go_by_these_two_functions_alone():
    paths = [*PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.cuh")]
    texts = {path.name: path.read_text() for path in paths}
    assert [name for name, text in texts.items() if "griddepcontrol" in text] == ["base.cuh"]
    base = texts["base.cuh"]
    assert base.count("griddepcontrol") == 2
    assert re.search(rf"void {WAIT}\(\) {{ asm volatile\(\"griddepcontrol.wait;", base)
    assert re.search(rf"void {LET}\(\) {{ asm volatile\(\"griddepcontrol.launch_dependents;", base)


# ---- The reader, on kernels that are made up ----


def problems(body: str, functions: str = "") -> set[str]:
    kernel = f"template <bool kIs>\n__global__ void __launch_bounds__(f(2)) k(int x) {{{body}}}"
    text = f"{functions}\n{kernel}".replace("wait;", f"{WAIT}();").replace("let;", f"{LET}();")
    return problems_of(text)["k"]


@pytest.mark.parametrize(
    "body",
    [
        "wait; let;",
        "wait;",
        "if (x > 1) return; wait; let;",
        "if (x > 1) { wait; } else { wait; } let;",
        "if (!kIs) wait; x = 2; if constexpr (kIs) wait; let;",
        "if (kIs) wait; if (kIs) { let; } else { wait; let; }",
        "for (int i = 0;; ++i) { if (i == 0) { wait; let; } if (i > x) break; }",
        '// let;\n/* let; */ f("let;"); wait; let;',
        "const auto load = [&](int i) { return x + i; }; load(1); wait; let;",
        "switch (x) { case 1: return; default: break; } wait; let;",
    ],
)
def test_kernels_in_order(body):
    assert problems(body) == set()


@pytest.mark.parametrize(
    "body",
    [
        "let; wait;",
        "if (x > 1) wait; let;",
        "if (x > 1) wait; else x = 2; let; wait;",
        "if (x > 1) wait; if (x > 1) let;",  # the text does not say that x stays what it is
        "if (kIs) wait; let; wait;",
        "if (kIs) wait; if (kHas) let; wait;",
        "if (!kIs) let; wait;",
        "for (int i = 0; i < x; ++i) { wait; } let;",
        "while (true) { let; break; } wait;",
        "if (x) { let; return; } wait;",
    ],
)
def test_kernels_out_of_order(body):
    assert problems(body) == {"k lets the next kernel start before it waits"}


@pytest.mark.parametrize("body", ["", "x = 1;", "if (kIs) wait;", "return; wait; let;"])
def test_kernels_that_never_wait(body):
    assert problems(body) == {"it never waits"}


@pytest.mark.parametrize(
    ("body", "functions", "is_fine"),
    [
        ("g(); let;", "__device__ void g() { wait; }", True),
        ("g(); let; wait;", "__device__ void g() { if (y) return; wait; }", False),
        ("S s{x}; s.g<2>(x); wait;", "struct S { int a; void g(int b) const { let; } };", False),
        ("wait; s.template g<Of<2>>(x);", "struct S { void g(int b) const { let; } };", True),
        ("S s(x); let;", "struct S { __device__ S(int x) : x(x) { wait; } };", True),
        # One of the two may be called: neither is known to have waited.
        ("a.g(); let; wait;", "struct S { void g() { wait; } }; struct T { void g() {} };", False),
        ("g(); h(); let;", "void g() { h(); }\nvoid h() { g(); wait; }", True),
        ("wait; const int y = sum < x ? 1 : 2; let;", "void sum() { let; }", True),
    ],
)
def test_calls_are_followed(body, functions, is_fine):
    assert (problems(body, functions) == set()) == is_fine


@pytest.mark.parametrize(
    ("body", "functions"),
    [
        ("switch (x) { case 1: wait; } let;", ""),
        ("do { wait; } while (x);", ""),
        ("const auto g = [&] { let; }; wait; g();", ""),
        ("x && g();", "bool g() { wait; return true; }"),
        ("x > 1 ? g() : f();", "void g() { wait; }"),
        ("wait;", "auto g() -> int { let; }"),
    ],
)
def test_what_the_reader_cannot_follow_is_refused(body, functions):
    with pytest.raises(Unclear):
        problems(body, functions)
