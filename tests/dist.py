"""Try a wheel and an sdist outside this checkout: python -m tests.dist FOLDER, which has both.

The wheel must hold the package's files and no others, the sdist must build the same wheel, and in
a virtual environment without this checkout the wheel must compute and its command must start.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

from moefp8 import __version__

REPOSITORY = Path(__file__).parents[1]
TRY = f"""
import importlib.metadata, sys
import torch, moefp8
assert moefp8.__file__.startswith(sys.prefix), moefp8.__file__
assert importlib.metadata.version("moefp8") == moefp8.__version__ == {__version__!r}
weights = torch.randn(4, 640, 256) / 16, torch.randn(4, 256, 320) / 16
experts = moefp8.GroupedExperts.from_weights(*weights)
x, router = torch.randn(3, 256).bfloat16(), moefp8.TopKRouter(256, num_experts=4, top_k=2)
routing = router(x)
exact = moefp8.testing.reference_model(experts)(x, *routing)
moefp8.testing.assert_matches_reference(experts(x, *routing), exact, 0.13)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints. Raises SystemExit with all that it wrote if it fails."""
    clean = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(x) for x in command]
    done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def require_equal(what: str, actual: set[str], expected: set[str]) -> None:
    if actual != expected:
        lacking, extra = sorted(expected - actual), sorted(actual - expected)
        raise SystemExit(f"{what}: lacking {lacking}, and besides {extra}")


def check_files(wheel: Path) -> None:
    """The wheel has the files of the package, and metadata beside them."""
    names = {name for name in contents(wheel) if ".dist-info/" not in name}
    sources = (path for path in (REPOSITORY / "moefp8").rglob("*") if path.is_file())
    expected = {
        path.relative_to(REPOSITORY).as_posix() for path in sources if path.suffix != ".pyc"
    }
    require_equal(f"{wheel.name} against moefp8/", names, expected)


def check_sdist(sdist: Path, wheel: Path, scratch: Path) -> None:
    """A wheel that is built from the sdist has the bytes of `wheel`, which the checkout built."""
    run(*pip(), "wheel", "--no-deps", "--no-build-isolation", sdist.absolute(), cwd=scratch)
    (rebuilt,) = scratch.glob("*.whl")
    old, new = contents(wheel), contents(rebuilt)
    require_equal(f"a wheel of {sdist.name} against {wheel.name}", {*new}, {*old})
    changed = sorted(name for name in old if old[name] != new[name])
    if changed:
        raise SystemExit(f"a wheel of {sdist.name} differs from {wheel.name} in {changed}")


def check_installed(wheel: Path, scratch: Path) -> None:
    """The wheel is installed alone; what it depends on comes from this environment."""
    venv.create(scratch / "venv")
    python = scratch / "venv" / "bin" / "python"
    run(*pip(), "--python", python, "install", "--no-deps", wheel.absolute(), cwd=scratch)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=scratch)
    dependencies = Path(site.strip()) / "dependencies.pth"
    dependencies.write_text(sysconfig.get_path("purelib"))  # after those of the wheel
    run(python, "-c", TRY, cwd=scratch)
    for command in ([python.with_name("moefp8")], [python, "-m", "moefp8"]):
        assert run(*command, "--version", cwd=scratch) == f"moefp8 {__version__}\n"
    facts = json.loads(run(python, "-m", "moefp8", "info", "--json", cwd=scratch))
    assert facts["moefp8"][0].startswith(f"{__version__}, ")


def pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        check_files(wheel)
        check_sdist(sdist, wheel, Path(scratch))
        check_installed(wheel, Path(scratch))
    print(f"{wheel.name} and {sdist.name} work outside this checkout")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
