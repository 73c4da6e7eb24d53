"""Structs that kernels take: laid out as the compiler does it; and what the reader refuses."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import moefp8
from moefp8.kernels.common.blocks import divisor_of
from moefp8.kernels.jit import JitError, Kernel, Struct, compile_kernel, offset_of, struct_of
from moefp8.kernels.jit.source import files_of
from tests.gpu import ARCH

PACKAGE = Path(moefp8.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.cu"))

# ---- The structs of the library, and what the compiler says ----

TYPES = """
template <class A, class B> constexpr bool kIsSame = false;
template <class A> constexpr bool kIsSame<A, A> = true;
template <class T> constexpr int kPointer = 0;  // to data that is written
template <class T> constexpr int kPointer<T*> = 1;
template <class T> constexpr int kPointer<const T*> = 2;  // or only read
template <class T> struct ElementOf;
template <class T, int N> struct ElementOf<T[N]> { using Type = T; };
template <class T> using Element = typename ElementOf<T>::Type;
#define OFFSET(Struct, field) __INTADDR__(&((Struct*)0)->field)  // this compiler's offsetof
"""
NAMES = {
    ctypes.c_float: "float",
    ctypes.c_int: "int",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint8: "uint8_t",
    ctypes.c_uint16: "uint16_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_uint64: "uint64_t",
}


def checks_of(struct: type[ctypes.Structure]) -> Iterator[str]:
    """What C++ has to say of a struct, of each field and of the structs within it."""
    name = struct.__name__
    yield f"sizeof({name}) == {ctypes.sizeof(struct)}"
    for field, kind in struct._fields_:
        yield f"OFFSET({name}, {field}) == {offset_of(struct, field)}"
        yield f"sizeof({name}::{field}) == {ctypes.sizeof(kind)}"
        one, element = kind, f"decltype({name}::{field})"
        if issubclass(kind, ctypes.Array):
            one, element = kind._type_, f"Element<{element}>"
        if one is ctypes.c_void_p:
            yield f"kPointer<{element}> == {1 + (field in struct._reads_)}"
        elif issubclass(one, ctypes.Structure):
            yield f"kIsSame<{element}, {one.__name__}>"
            yield from checks_of(one)
        else:
            yield f"kIsSame<{element}, {NAMES[one]}>"


def assert_fits(struct: type[Struct], source: Path, folder: Path) -> None:
    """Raises JitError if the compiler has another layout of the struct in a source."""
    for name, text in files_of(source).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    checks = "\n".join(f"static_assert({check});" for check in checks_of(struct))
    main = folder / "checks.cu"
    main.write_text(f'#include "{source.name}"\n{TYPES}{checks}\n__global__ void nothing() {{}}\n')
    compile_kernel(Kernel(main, "nothing"), ARCH)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("source", SOURCES, ids=lambda x: x.stem)
def test_arguments_lie_in_memory_as_the_kernels_read_them(source, tmp_path):
    assert_fits(struct_of(source), source, tmp_path)


EXAMPLE = """
#include "inner.cuh"
#include "divisor.cuh"  // of the library
// struct Arguments { int in_a_comment; };
constexpr int kCount = 3;
struct Outer {
  Inner inner;  const float* read;
  uint8_t *written; // a pointer
  const uint8_t* many[2];
};
struct Arguments {
  int64_t long_one, /* two */ another;
  Outer outer;
  uint8_t small; uint16_t sizes[kCount], more;
  Divisor divisors[2];
  float
    f;
  __device__ int get() const { if (f > 0) { return small; } return "};"[0]; }
  template <int k> __device__ int other() const {
#pragma unroll
    for (int i = 0; i < k; ++i) {}
    return k;
  }
};
"""


@pytest.fixture
def example(tmp_path) -> Path:
    (tmp_path / "inner.cuh").write_text("#pragma once\nstruct Inner { int x; void* p; };\n")
    source = tmp_path / "example.cu"
    source.write_text(EXAMPLE)
    return source


@pytest.mark.usefixtures("own_cache")
def test_structs_and_constants_of_included_files_are_read(example, tmp_path):
    arguments = struct_of(example)
    assert_fits(arguments, example, tmp_path / "checks")
    names = "long_one another outer small sizes more divisors f"
    assert [name for name, _ in arguments._fields_] == names.split()
    assert struct_of(example, "Outer")._reads_ == {"read", "many"}
    assert arguments._reads_ == frozenset()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("const float* read;", "float* read;"),
        ("uint8_t *written;", "const uint8_t* written;"),
        ("uint8_t small;", "uint16_t small;"),
        ("int64_t long_one, /* two */ another;", "uint64_t another, long_one;"),
        ("kCount = 3", "kCount = 4"),
        ("float\n    f;", "int f;"),
        ("float\n    f;", "float f; int one_more;"),
    ],
)
def test_another_layout_is_seen(example, tmp_path, before, after):
    arguments = struct_of(example)
    assert before in EXAMPLE
    example.write_text(EXAMPLE.replace(before, after))
    with pytest.raises(JitError, match="static assertion failed"):
        assert_fits(arguments, example, tmp_path / "checks")


def test_a_struct_is_filled_by_name_and_by_values_in_their_order(example):
    outer = struct_of(example, "Outer")(inner=(7, 8))
    args = struct_of(example)(outer=outer, sizes=(1, 2), divisors=((3, 0, 0), (5, 0, 0)))
    assert (args.outer.inner.x, args.outer.inner.p, *args.sizes) == (7, 8, 1, 2, 0)
    assert [x.value for x in args.divisors] == [3, 5]
    with pytest.raises(TypeError):
        outer.inner = struct_of(example, "Outer")()


def test_a_divisor_names_all_fields_of_the_kernels():
    for source in (PACKAGE / "quant" / "quantize.cu", PACKAGE / "routing" / "plan.cu"):
        fields = [name for name, _ in struct_of(source, "Divisor")._fields_]
        assert [*divisor_of(3)] == fields


def test_a_struct_is_one_class_in_all_threads_and_sources():
    plan, dispatch = (PACKAGE / "routing" / f"{name}.cu" for name in ("plan", "dispatch"))
    struct_of.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        classes = set(pool.map(lambda source: struct_of(source, "Routing"), 16 * [plan, dispatch]))
    assert len(classes) == 1
    struct_of(plan)(routing=struct_of(dispatch, "Routing")())


# ---- What is refused ----


def source_of(folder: Path, text: str) -> Path:
    source = folder / "some.cu"
    source.write_text(text)
    return source


@pytest.mark.parametrize(
    "members",
    [
        "int x = 1;",
        "int x{1};",
        "float x = f(1);",
        "int x : 3;",
        "union { int x; float y; };",
        "union U { int x; } u;",
        "enum { kA } x;",
        "enum Kind { kA } x;",
        "struct { int x; } y;",
        "int *x, *y;",
        "const int* x, y;",
        "int x, *y;",
        "int** x;",
        "const int* const* x;",
        "int* const x;",
        "int* __restrict__ x;",
        "int const* x;",
        "int& x;",
        "const int x;",
        "static int x;",
        "static constexpr int kX = 1;",
        "int x[2][2];",
        "int x[2 * 2];",
        "int (*f)(int);",
        "int f(int x);",
        "using T = int;",
        "alignas(16) int x;",
        "unsigned int x;",
        "a::Inner x;",
        "Box<int> x;",
        "public: int x;",
        "FIELDS(int)",
    ],
)
def test_members_of_other_kinds_are_refused(tmp_path, members):
    source = source_of(tmp_path, f"struct Arguments {{ int first; {members} }};")
    with pytest.raises(
        ValueError, match=r"some\.cu: struct Arguments: `.*` cannot be read: a memb"
    ):
        struct_of(source)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("struct Arguments { bool x; };", "`bool x`: bool must be a struct of these sources, or"),
        ("struct Arguments { size_t x; };", "`size_t x`: size_t must be a struct"),
        ("enum E { kA }; struct Arguments { E x; };", "`E x`: E must be a struct"),
        ("enum class E { kA }; struct Arguments { E x; };", "`E x`: E must be a struct"),
        ("enum struct E { kA }; struct Arguments { E x; };", "`struct E {`: .* must be no .* enum"),
        ("using T = int; struct Arguments { T x; };", "`T x`: T must be a struct"),
        ("template <class T> struct Arguments { int x; };", "must be no template"),
        ("template <class T>\nstruct A { T x; }; struct Arguments { A x; };", "no template"),
        ("template <> struct Arguments<int> { int x; };", "must be no template"),
        (
            "struct A {}; struct Arguments : A { int x; };",
            "`struct Arguments : A {`: .* no derived",
        ),
        ("struct Arguments { int x; }; struct Arguments { int x; };", "once, found 2"),
        ("struct Arguments { A a; }; struct A {}; struct A {};", "`struct A` .* once, found 2"),
        ("#if X\nstruct Arguments {\n};\n#else\nstruct Arguments {\n};\n#endif", "once, found 2"),
        ("struct Arguments; // struct Arguments {};", "must be there once, found 0"),
        ("struct Others { int x; };", "`struct Arguments` must be there once, found 0"),
        ("struct Arguments {\n#if X\n  int x;\n#endif\n};", "the preprocessor must not change"),
        ("struct Arguments {\n#include FIELDS\n};", "the preprocessor must not change"),
        ("struct Arguments { __device__ int f(); int x; };", "`int x` must come before the memb"),
        ("struct Arguments { int x[kX]; };", r"\[kX\]: `constexpr int kX = ` a number .* found 0"),
        ("constexpr int kX = 2 * 2; struct Arguments { int x[kX]; };", r"\[kX\]: .* found 0"),
        (2 * "constexpr int kX = 2;" + "struct Arguments { int x[kX]; };", r"\[kX\]: .* found 2"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, text, told):
    with pytest.raises(ValueError, match=rf"some\.cu: .*{told}"):
        struct_of(source_of(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(JitError, match=r"none\.cu cannot be read"):
        struct_of(tmp_path / "none.cu")
    with pytest.raises(JitError, match=r'some\.cu: includes "nowhere.cuh", not found in .*device'):
        struct_of(source_of(tmp_path, '#include "nowhere.cuh"\nstruct Arguments {};'))
