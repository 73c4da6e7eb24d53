"""Which GPUs run kernels, and what another GPU's GEMMs touch."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, TopKRouter
from moefp8.kernels import jit
from moefp8.kernels.gemm import segments
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.sm90.gemms import Sm90
from moefp8.kernels.jit.source import files_of
from moefp8.kernels.program import Codes, Place, Record, Tensor
from moefp8.kernels.targets import GEMMS, target_of, target_with, targets_here
from moefp8.precompile import layers as ahead
from tests.gpu import ARCH, NUM_SMS
from tests.test_package import imports_of

ROOT = Path(moefp8.__file__).parent
OTHER = "sm_80"


class OtherGemms(Sm90):
    """GEMMs of another GPU: one step each, of a kernel that any GPU has."""

    def dense(self, r, a, b, d, **options):
        r.step(
            segments.kernel_of(),
            1,
            32,
            {"group_of_row": a.data.place, "list": d.place},
            programmatic=False,
        )

    def grouped(self, r, a, b, d, layout, bounds, **options):
        self.dense(r, a, b, d)

    def describe(self, r, config, a, b, d, tokens, **options):
        self.dense(r, a, b, d)


@pytest.fixture
def other():
    """A table that has GEMMs of another architecture, too."""
    with mock.patch.dict(GEMMS, {OTHER: OtherGemms}):
        yield


def test_a_target_has_the_gemms_of_its_architecture(other):
    for arch, gemms in ((ARCH, Sm90), (OTHER, OtherGemms)):
        target = target_with(arch, 108)
        assert (target.arch, target.num_sms, type(target.gemms)) == (arch, 108, gemms)
        assert target == target_with(arch, 108)
        assert hash(target) == hash(target_with(arch, 108))
    with pytest.raises(KeyError):
        target_with("sm_75", 72)


def test_a_gpu_runs_the_kernels_of_its_architecture(other, gpu, monkeypatch):
    monkeypatch.setattr(gpu, "arch", lambda device_index: OTHER)
    assert target_of(-1) == target_with(OTHER, NUM_SMS)
    layer, x = FP8Linear(256, 128, bias=False), torch.zeros(4, 256).bfloat16()
    monkeypatch.setattr(gpu.library, "cuLaunchKernelEx", lambda *_: 0)
    with torch.no_grad():
        layer(x)
    assert [kernel.source.stem for kernel in gpu.kernels[-2:]] == ["quantize", "segments"]


def test_records_of_another_target_have_its_kernels(other):
    target = target_with(OTHER, 108)
    r = Record(target, ("a", "a_scales", "b", "b_scales", "bounds", "d"))
    a, b = Codes.contiguous("a", 1, 8, 256), Codes.contiguous("b", 4, 128, 256)
    d = Tensor.contiguous("d", 1, 8, 128)
    target.gemms.grouped(r, a, b, d, GroupLayout.OFFSETS, Place("bounds"))
    assert [kernel.source.stem for kernel in r.kernels] == ["segments"]


def test_precompile_lists_for_a_target(other):
    """What needs WGMMA outside of GEMMs is listed where there is WGMMA."""
    layers = FP8Linear(256, 128, bias=False), GroupedExperts(4, 256, 128), TopKRouter(256, 4, 2)
    model = nn.ModuleList(layers)
    sources = {}
    for arch in (ARCH, OTHER):
        kernels = ahead.kernels_of(model, 64, target_with(arch, NUM_SMS), top_k=2)
        sources[arch] = {kernel.source.stem for kernel in kernels}
    assert sources[ARCH] - sources[OTHER] == {"gemm", "logits"}
    assert sources[OTHER] - sources[ARCH] == {"segments"}
    assert sources[ARCH] & sources[OTHER] >= {"quantize", "dispatch", "combine", "top_k"}


def test_precompile_compiles_for_each_architecture_here(other, monkeypatch):
    compiled, kept = {}, []
    targets = [target_with(arch, NUM_SMS) for arch in (ARCH, OTHER, ARCH)]
    monkeypatch.setattr(ahead, "targets_here", lambda num_sms: targets)
    monkeypatch.setattr(
        ahead, "compile_kernels", lambda some, arch, *_: compiled.update({arch: [*some]})
    )
    monkeypatch.setattr(ahead, "keep_kernels", kept.append)
    layer = FP8Linear(256, 128, bias=False)
    done = moefp8.precompile(layer, 8)
    assert compiled == {x.arch: ahead.kernels_of(layer, 8, x) for x in targets}
    assert done.num_kernels == sum(map(len, compiled.values()))
    assert [{arch: [*some] for arch, some in x.items()} for x in kept] == [compiled]


def test_without_a_gpu_targets_are_those_that_are_asked_for():
    if not torch.cuda.is_available():
        assert targets_here() == [target_with(ARCH, 132)]
        assert targets_here(78) == [target_with(ARCH, 78)]


@pytest.mark.usefixtures("own_cache")
def test_a_kernel_is_compiled_for_each_architecture():
    images = {
        arch: jit.compile_kernel(segments.kernel_of(), arch).image for arch in (ARCH, "sm_100a")
    }
    assert len({*images.values()}) == 2
    for arch, image in images.items():
        assert jit.compile_kernel(segments.kernel_of(), arch).image == image


# ---- Who knows WGMMA ----


def test_wgmma_is_used_by_gemms_of_hopper_and_by_the_router_that_says_so():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.cu")
        if "wgmma.cuh" in files_of(path)
    }
    gemms = {x for x in users if x.startswith("kernels/gemm/sm90/")}
    assert users - gemms == {"routing/logits.cu"}
    assert len(gemms) == 2


def test_few_know_the_gemms_of_a_gpu():
    """Kernels' table, and what measures their configs."""
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any(name.startswith("moefp8.kernels.gemm.sm90.") for name in imports_of(path))
    }
    others = {x for x in knowing if not x.startswith(("kernels/gemm/sm90/", "tuning/"))}
    assert others == {"kernels/targets.py", "cli/bench.py", "cli/info.py"}
