"""Every form in which DeepGEMM's releases and its tests call the GEMMs of weight gradients.

Results are judged against the dequantized operands in FP64, row by row. DeepGEMM's own cases follow
its tests in shapes: small ones on the CPU, and whole on a GPU.
"""

import random
from itertools import pairwise

import pytest
import torch

import moefp8.deep_gemm as deep_gemm
from moefp8.quant import quantize_1x128
from moefp8.testing import assert_matches_reference
from tests.deep_gemm.cases import NAN, called, forms, row_major
from tests.gpu import no_synchronisation, on_cpu_and_gpu, on_gpu

M, N, K = 101, 70, 300
FEW = 256, 0, 128, 384  # the K of each group
MANY = 128, 0, 256, 128, 0, 128, 384, 128, 128, 256, 128, 128, 0


def bound(device: str, d: torch.Tensor) -> float:
    """Tensor cores add FP8 products in fewer bits than FP32 has."""
    if d.dtype == torch.bfloat16:
        return 4e-3
    return 1e-6 if device == "cpu" else 2e-3


def values(pair) -> torch.Tensor:
    """fp64 [F, K] of codes with 1x128 scales."""
    codes, scales = pair
    return codes.double() * scales.double().repeat_interleave(128, 1)[:, : codes.shape[1]]


# ---- Dense ----


def dense(device: str = "cpu", m: int = M, n: int = N, k: int = K) -> dict[str, object]:
    """Both operands with 1x128 scales; d is NaN, and d_16 in BF16."""
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    a, b = row_major(quantize_1x128(x)), row_major(quantize_1x128(w))
    d, c = torch.full((m, n), NAN, device=device), torch.randn(m, n, device=device) * 32
    names = {"x": x, "w": w, "a": a, "b": b, "c": c, "d": d, "d_16": d.bfloat16()}
    return names | {"a_t": (a[0].T, a[1].T), "b_t": (b[0].T, b[1].T)}


PRODUCTS = forms("""
deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))
deep_gemm.fp8_gemm_nt(a, b, d, recipe=[1, 1, 128], disable_ue8m0_cast=True)
deep_gemm.fp8_gemm_nt(a, b, d, None, (1, 1, 128))
deep_gemm.fp8_gemm_nt(a, b, d, None, (1, 1, 128), "nk", True)
deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=(1, 128))
deep_gemm.fp8_gemm_nt((a[0], get_mn_major_tma_aligned_tensor(a[1])), b, d, recipe=(1, 1, 128))
deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_token_cast_to_fp8(w), d,
    recipe=(1, 1, 128))
deep_gemm.fp8_gemm_nn(a, b_t, d, recipe=(1, 1, 128))
deep_gemm.fp8_gemm_tn(a_t, b_t, d, recipe=(1, 1, 128))
deep_gemm.fp8_gemm_tt(a_t, b, d, recipe=(1, 1, 128))
deep_gemm.fp8_fp4_gemm_nt(a, b, d, recipe=(1, 1, 128), recipe_a=None, recipe_b=None)
deep_gemm.fp8_gemm_nt(a, b, d_16, recipe=(1, 1, 128))
""")

SUMS = forms("""
deep_gemm.fp8_gemm_nt(a, b, d, c, (1, 1, 128))
deep_gemm.fp8_gemm_nt(a, b, d, c=c, recipe=(1, 1, 128))
deep_gemm.fp8_gemm_nt(a, b, d.copy_(c), c=d, recipe=(1, 1, 128), disable_ue8m0_cast=True)
deep_gemm.fp8_gemm_nn(a, b_t, d, c=c, recipe=(1, 1, 128))
deep_gemm.fp8_gemm_tn(a_t, b_t, d, c=c, recipe=(1, 1, 128))
deep_gemm.fp8_gemm_tt(a_t, b, d, c=c, recipe=(1, 1, 128))
deep_gemm.fp8_fp4_gemm_nt(a, b, d.copy_(c), c=d, recipe=(1, 1, 128), recipe_a=None, recipe_b=None)
deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, b, d.copy_(c))
deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(lhs=a, rhs=b, out=d.copy_(c))
deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt((a[0], a[1].T), (b[0], b[1].T.contiguous()), d.copy_(c))
""")


@on_cpu_and_gpu
@pytest.mark.parametrize("k", [K, 384])
@pytest.mark.parametrize("form", PRODUCTS + SUMS)
def test_dense(device, form, k):
    case = dense(device, k=k)
    expected = values(case["a"]) @ values(case["b"]).T
    if form in SUMS:
        expected = expected + case["c"].double()
    c = case["c"].clone()
    assert called(form, case) is None
    d = case["d_16" if "d_16" in form else "d"]
    assert_matches_reference(d, expected, bound(device, d))
    assert torch.equal(case["c"], c)


@on_cpu_and_gpu
def test_rows_may_lie_apart(device):
    case = dense(device, k=256)
    a, b = (torch.nn.functional.pad(case[name][0].view(torch.uint8), (0, 128)) for name in "ab")
    padded = {
        name: (codes.view(torch.float8_e4m3fn)[:, :256], case[name][1])
        for name, codes in (("a", a), ("b", b))
    }
    whole = torch.full((M, N + 10), NAN, device=device)
    deep_gemm.fp8_gemm_nt(padded["a"], padded["b"], whole[:, :N], recipe=(1, 1, 128))
    deep_gemm.fp8_gemm_nt(case["a"], case["b"], case["d"], recipe=(1, 1, 128))
    assert torch.equal(whole[:, :N], case["d"])
    assert whole[:, N:].isnan().all()


@on_cpu_and_gpu
def test_a_dense_product_of_nothing(device):
    without_k = dense(device, k=0)
    deep_gemm.fp8_gemm_nt(without_k["a"], without_k["b"], without_k["d"], recipe=(1, 1, 128))
    assert not without_k["d"].any()
    deep_gemm.fp8_gemm_nt(*(without_k[name] for name in "abdc"), recipe=(1, 1, 128))
    assert torch.equal(without_k["d"], without_k["c"])
    without_rows = dense(device, m=0)
    deep_gemm.fp8_gemm_nt(*(without_rows[name] for name in "abdc"), recipe=(1, 1, 128))


def test_scales_that_fit_both_ways_are_row_major():
    case = dense(m=3, k=384)
    expected = case["c"] + values(case["a"]) @ values(case["b"]).T
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(case["a"], case["b"], case["c"])
    assert_matches_reference(case["c"], expected, 1e-6)


# ---- Grouped ----


def grouped(device: str = "cpu", ks=FEW, m: int = M, n: int = N) -> dict[str, object]:
    """a and b are as `nt` has them, a_t and b_t as `tn`, a_k and b_k the same with K innermost."""
    starts = [0]
    for k in ks:
        starts.append(starts[-1] + k)
    names = {"ks": list(ks), "ks_tensor": torch.tensor(ks, dtype=torch.int32, device=device)}
    for name, features in (("a", m), ("b", n)):
        tokens = torch.randn(starts[-1], features, device=device)
        codes, scales = deep_gemm.per_channel_cast_to_fp8(tokens)
        flat = [codes[:0].flatten()]
        flat += [codes[start:end].T.flatten() for start, end in pairwise(starts)]
        names[name] = torch.cat([x.view(torch.uint8) for x in flat]).view(codes.dtype), scales.T
        names[f"{name}_t"] = codes, scales
        names[f"{name}_k"] = codes.T.contiguous().T, scales
        names[f"groups_{name}"] = [
            (codes[start:end].T.contiguous(), scales[start // 128 : end // 128].T)
            for start, end in pairwise(starts)
        ]
    d = torch.full((len(ks), m, n), NAN, device=device)
    return names | {"d": d, "d_16": d.bfloat16(), "c": torch.randn_like(d) * 32}


def check_groups(case: dict[str, object], d: torch.Tensor, is_sum: bool) -> None:
    for group, (a, b) in enumerate(zip(case["groups_a"], case["groups_b"], strict=True)):
        expected = values(a) @ values(b).T
        if is_sum:
            expected = expected + case["c"][group].double()
        assert_matches_reference(d[group], expected, bound(d.device.type, d))


GROUPED = forms("""
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, ks_tensor)
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, ks_tensor, None, (1, 1, 128), "mn")
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a=a, b=b, d=d, ks=ks, ks_tensor=ks_tensor)
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks_cpu=ks, grouped_layout=ks_tensor)
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, tuple(ks), ks_tensor, use_psum_layout=False)
deep_gemm.k_grouped_fp8_gemm_nt_contiguous((a[0], a[1].contiguous()),
    (b[0], get_mn_major_tma_aligned_tensor(b[1])), d, ks, ks_tensor)
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d_16, ks, ks_tensor)
deep_gemm.k_grouped_fp8_gemm_tn_contiguous(a_t, b_t, d, ks, ks_tensor)
deep_gemm.k_grouped_fp8_gemm_tn_contiguous(a_k, b_k, d, ks, ks_tensor)
deep_gemm.k_grouped_fp8_gemm_tn_contiguous(a_t, b_k, d, ks_cpu=ks, grouped_layout=ks_tensor)
""")

GROUPED_SUMS = forms("""
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, ks_tensor, c)
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, ks_tensor, c, recipe=(1, 1, 128),
    use_psum_layout=False)
deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d.copy_(c), ks, ks_tensor, d, (1, 1, 128), "mn")
deep_gemm.k_grouped_fp8_gemm_tn_contiguous(a_t, b_t, d, ks, ks_tensor, c)
deep_gemm.k_grouped_fp8_gemm_tn_contiguous(a_t, b_t, d.copy_(c), ks, ks_tensor, c=d)
deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt((a[0], a[1].T), (b[0], b[1].T), d.copy_(c), ks)
deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(lhs=(a[0], a[1].T), rhs=(b[0], b[1].T),
    out=d.copy_(c), batch_sizes=ks)
""")


@on_cpu_and_gpu
@pytest.mark.parametrize("ks", [FEW, MANY])
@pytest.mark.parametrize("form", GROUPED + GROUPED_SUMS)
def test_grouped(device, form, ks):
    case = grouped(device, ks)
    c = case["c"].clone()
    assert called(form, case) is None
    check_groups(case, case["d_16" if "d_16" in form else "d"], form in GROUPED_SUMS)
    assert torch.equal(case["c"], c)


@on_cpu_and_gpu
@pytest.mark.parametrize("ks", [FEW, MANY, (0,) * 12, (128,) * 9, (0, 0, *MANY, *MANY)])
def test_a_group_has_the_bits_of_its_dense_product(device, ks):
    case = grouped(device, ks, m=64, n=48)
    expected = torch.zeros_like(case["d"])
    for group, operands in enumerate(zip(case["groups_a"], case["groups_b"], strict=True)):
        deep_gemm.fp8_gemm_nt(*operands, expected[group], recipe=(1, 1, 128))
    for form in (GROUPED[0], GROUPED[7], GROUPED[8]):
        called(form, case)
        assert torch.equal(case["d"], expected), form


@on_cpu_and_gpu
def test_codes_may_lie_anywhere_in_memory(device):
    """One byte further, and with rows of an odd pitch, eight codes cannot be moved as one."""
    case = grouped(device, (128,) * 9)
    called(GROUPED[0], case)
    expected = case["d"].clone()
    for name in "ab":
        codes, scales = case[name]
        moved = torch.cat([codes.view(torch.uint8)[:1], codes.view(torch.uint8)])
        case[name] = moved.view(codes.dtype)[1:], scales
    for name in ("a_k", "b_k"):
        codes, scales = case[name]
        moved = torch.nn.functional.pad(codes.T.view(torch.uint8), (0, 1)).view(codes.dtype)
        case[name] = moved[:, :-1].T, scales
    for form in (GROUPED[0], GROUPED[8]):
        called(form, case)
        assert torch.equal(case["d"], expected), form


@on_cpu_and_gpu
def test_first_releases_take_any_k(device):
    ks, groups, names = (100, 0, 128, 300, 1), [], {}
    for name, features in (("a", M), ("b", N)):
        pairs = [row_major(quantize_1x128(torch.randn(features, k, device=device))) for k in ks]
        flat = torch.cat([codes.flatten().view(torch.uint8) for codes, _ in pairs])
        scales = torch.cat([scales.T for _, scales in pairs])
        names[name] = flat.view(torch.float8_e4m3fn), scales
        groups.append(pairs)
    out = torch.randn(len(ks), M, N, device=device)
    case = {"groups_a": groups[0], "groups_b": groups[1], "c": out.clone()}
    deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(names["a"], names["b"], out, list(ks))
    check_groups(case, out, is_sum=True)


@pytest.mark.parametrize("form", [*GROUPED[:1], *GROUPED[7:9], *GROUPED_SUMS[-1:]])
@pytest.mark.parametrize(("m", "n"), [(0, N), (M, 0)])
def test_groups_without_features(form, m, n):
    for ks in (FEW, MANY):
        called(form, grouped(ks=ks, m=m, n=n))


def test_no_groups():
    case = grouped(ks=())
    called(GROUPED[0], case)
    called(GROUPED[7], case)


@on_gpu
@pytest.mark.parametrize("ks", [FEW, MANY])
@pytest.mark.parametrize("form", [GROUPED[0], GROUPED[7], GROUPED_SUMS[0], GROUPED_SUMS[-2]])
def test_nothing_waits_for_the_gpu(form, ks):
    case = grouped("cuda", ks)
    called(form, case)
    with no_synchronisation():
        called(form, case)
    check_groups(case, case["d"], form in GROUPED_SUMS)


# ---- DeepGEMM's own cases ----

# M, N, K of weight gradients in its test of dense GEMMs, and of that in its first releases.
DENSE_CASES = [
    (2112, 4096, 7168),
    (576, 4096, 7168),
    (24576, 4096, 1536),
    (32768, 4096, 512),
    (7168, 4096, 16384),
    (4096, 4096, 7168),
    (7168, 4096, 2048),
    (7168, 2112, 4096),
    (512, 32768, 8192),
    (16384, 7168, 8192),
]
# Groups, M, N and the mean K of a group.
GROUPED_CASES = [
    (4, 4096, 7168, 8192),
    (4, 7168, 2048, 8192),
    (8, 4096, 7168, 4096),
    (8, 7168, 2048, 4096),
    (16, 4096, 7168, 2048),
    (16, 7168, 2048, 2048),
    (72, 4096, 7168, 384),
    (128, 1536, 2048, 256),
]


@on_cpu_and_gpu
@pytest.mark.parametrize("shape", DENSE_CASES)
def test_dense_cases_of_deep_gemm(device, shape):
    m, n, k = shape if device == "cuda" else (size // 32 for size in shape)
    a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
    d = torch.randn(m, n, device=device) * 32
    expected = d + a.float() @ b.float().T
    operands = deep_gemm.per_token_cast_to_fp8(a), deep_gemm.per_token_cast_to_fp8(b)
    deep_gemm.fp8_gemm_nt(*operands, d, c=d, recipe=(1, 1, 128))
    assert deep_gemm.calc_diff(d, expected) < 1e-3


@on_cpu_and_gpu
@pytest.mark.parametrize("has_empty", [False, True])
@pytest.mark.parametrize("shape", GROUPED_CASES)
def test_grouped_cases_of_deep_gemm(device, shape, has_empty):
    num_groups, m, n, mean_k = shape
    if device == "cpu":
        m, n, mean_k = m // 64, n // 64, mean_k // 16
    chance = random.Random(0)
    ks = [deep_gemm.align(int(mean_k * chance.uniform(0.7, 1.3)), 128) for _ in range(num_groups)]
    if has_empty:
        ks[chance.randrange(num_groups)] = 0
    case = grouped(device, ks, m, n)
    d, before = case["c"], case["c"].clone()
    called(GROUPED_SUMS[2], case | {"d": d})
    for group, (a, b) in enumerate(zip(case["groups_a"], case["groups_b"], strict=True)):
        expected = before[group] + values(a).float() @ values(b).float().T
        assert_matches_reference(d[group], expected, bound(device, d))


# ---- Refusals ----

NT = "deep_gemm.k_grouped_fp8_gemm_nt_contiguous"
TN = "deep_gemm.k_grouped_fp8_gemm_tn_contiguous"
OLD = "deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt"
REFUSED = {
    f"{NT}(a, b, d, ks, ks_tensor, recipe=(1, 128, 128))": r"recipe must be \(1, 1, 128\)",
    f"{NT}(a, b, d, ks, ks_tensor, recipe=None)": r"recipe must be \(1, 1, 128\).*got None",
    f"{TN}(a_t, b_t, d, ks, ks_tensor, recipe=(1, 1, 32))": "other blocks are for Blackwell",
    f"{NT}(a, b, d, None, ks_tensor, use_psum_layout=True)": "use_psum_layout must be False",
    f"{NT}(a, b, d, None, ks_tensor)": "give either ks or",
    f"{NT}(a, b, d, ks, ks_tensor, ks_cpu=ks)": "give either ks or",
    f"{NT}(a, b, d, ks)": "give either ks_tensor or",
    f"{NT}(a, b, d, ks_tensor, ks_tensor)": "ks must be a list of ints on the host, got .*Tensor",
    f"{NT}(a, b, d, [256, 0, 100, 412], ks_tensor)": r"ks\[2\] must be 0 or.* 128, got 100; fill",
    f"{NT}(a, b, d, [256, 0, -128, 640], ks_tensor)": r"ks\[2\] must be 0 or.*got -128",
    f"{NT}(a, b, d, [256, 0, 128, 384.0], ks_tensor)": r"ks\[3\] must be an int, got 384.0",
    f"{NT}(a, b, d, [*ks, 0], ks_tensor)": r"d must be \[G, M, N\] for the G of ks = \[5, 101, 70",
    f"{NT}(a, b, d, [128, 0, 256, 384], ks_tensor)": "ks_tensor must have the values of ks",
    f"{NT}(a, b, d, ks, ks_tensor.long())": "ks_tensor must be int32, got int64",
    f"{NT}(a, b, d, ks, ks_tensor[1:])": r"ks_tensor must be \[G\].*= \[4\], got \[3\]",
    f"{NT}(a[0], b, d, ks, ks_tensor)": "a must be a pair",
    f"{NT}((a[0].view(torch.int8), a[1]), b, d, ks, ks_tensor)": "FP4 is for Blackwell",
    f"{NT}((a[0], a[1].int()), b, d, ks, ks_tensor)": "scales of a must be float32 on Hopper",
    f"{NT}((a[0], a[1].T), b, d, ks, ks_tensor)": r"scales of a .*\[features.*\[101, 6\], got",
    f"{NT}(a, (b[0], b[1][:, 1:]), d, ks, ks_tensor)": r"scales of b must be .*\[70, 6\], got",
    f"{NT}((a[0][1:], a[1]), b, d, ks, ks_tensor)": "a must hold a contiguous .101, k. of each",
    f"{NT}((a[0].view(-1, 2).T, a[1]), b, d, ks, ks_tensor)": "a must hold a contiguous",
    f"{NT}((a[0].to(torch.float8_e5m2), a[1]), b, d, ks, ks_tensor)": "a must be float8_e4m3fn",
    f"{NT}(a, b, d[:1].expand(4, -1, -1), ks, ks_tensor)": "d must not be expanded",
    f"{NT}(a, b, d[:1].expand(4, -1, -1), ks, ks_tensor, c)": "d must not be expanded",
    f"{OLD}((a[0], a[1].T), (b[0], b[1].T), d[:, :1].expand_as(d), ks)": "out must not be expanded",
    f"{NT}(a, b, d[0], ks, ks_tensor)": "d must have 3 dimensions",
    f"{NT}(a, b, d.mT.contiguous().mT, ks, ks_tensor)": "last dimension of d must be contiguous",
    f"{NT}(a, b, d.half(), ks, ks_tensor)": "d must be float32 or bfloat16, got float16",
    f"{NT}(a, b, d_16, ks, ks_tensor, c)": "d, which the product is added to, must be float32",
    f"{NT}(a, b, d, ks, ks_tensor, c[1:])": "c must have the shape and dtype of d",
    f"{NT}(a, b, d, ks, ks_tensor.to('meta'))": "on one device, got .*ks_tensor on meta",
    f"{TN}(a, b, d, ks, ks_tensor)": "a must have 2 dimensions",
    f"{TN}(a_t, (b_t[0][1:], b_t[1]), d, ks, ks_tensor)": r"b must be .*\[768, 70\], got",
    f"{TN}(a_t, (b_t[0], b[1]), d, ks, ks_tensor)": r"scales of b .*\[blocks.*\[6, 70\], got",
    f"{TN}((a_t[0].repeat(1, 2)[:, ::2], a_t[1]), b_t, d, ks, ks_tensor)": "dimension of a must be",
    f"{OLD}(a, (b[0], b[1].T), d, ks)": r"scales of lhs must be \[blocks.*\[6, 101\], got",
    f"{OLD}((a[0], a[1].T), (b[0][1:], b[1].T), d, ks)": "rhs must hold",
    f"{OLD}((a[0], a[1].T), (b[0], b[1].T), d_16, ks)": "out, which the product is added to, must",
    f"{OLD}((a[0], a[1].T), (b[0], b[1].T), d, ks_tensor)": "batch_sizes must be a list of ints",
}


@pytest.mark.parametrize("form", REFUSED)
def test_refusals_of_groups(form):
    case = grouped()
    with pytest.raises((TypeError, ValueError), match=REFUSED[form]):
        called(form, case)
    assert case["d"].isnan().all()
    assert case["d_16"].isnan().all()


WGRAD = "deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt"
REFUSED_DENSE = {
    "deep_gemm.fp8_gemm_nt(a, b, d_16, c=c.bfloat16(), recipe=(1, 1, 128))": "d, which.* float32",
    "deep_gemm.fp8_gemm_nt(a, b, d, c=c.bfloat16(), recipe=(1, 1, 128))": "c must have the shape",
    "deep_gemm.fp8_gemm_nt(a, b, d.half(), recipe=(1, 1, 128))": "d must be float32 or bfloat16",
    "deep_gemm.fp8_gemm_nt(a, b, d[1:], recipe=(1, 1, 128))": r"d must be \[M, N\] = \[101, 70\]",
    "deep_gemm.fp8_gemm_nt(a, (b[0][:, 1:], b[1]), d, recipe=(1, 1, 128))": "with the K of a",
    "deep_gemm.fp8_gemm_nt((a[0], a[1][1:]), b, d, c, (1, 1, 128))": r"scales of a.*\[101, 3\]",
    "deep_gemm.fp8_gemm_nt((a[0][None], a[1]), b, d, c, (1, 1, 128))": "a must have 2 dimensions",
    "deep_gemm.fp8_gemm_tn((a_t[0].contiguous(), a_t[1]), b_t, d, c, (1, 1, 128))": "be K-major",
    "deep_gemm.fp8_gemm_nt(a, b, d.to('meta'), recipe=(1, 1, 128))": "one device, got.* d on meta",
    f"{WGRAD}(a, b, d_16)": "out, which the product is added to, must be float32, got bfloat16",
    f"{WGRAD}((a[0], a[1][:, 1:]), b, d)": r"scales of lhs must be .*\[101, 3\], got \[101, 2\]",
    f"{WGRAD}(a, (b[0].T.contiguous().T, b[1]), d)": "rhs must be K-major",
    f"{WGRAD}(a, b, d[:1].expand_as(d))": "out must not be expanded",
    "deep_gemm.fp8_gemm_nt(a, b, d[:1].expand_as(d), recipe=(1, 1, 128))": "must not be expanded",
}


@pytest.mark.parametrize("form", REFUSED_DENSE)
def test_refusals(form):
    case = dense()
    with pytest.raises((TypeError, ValueError), match=REFUSED_DENSE[form]):
        called(form, case)
    assert case["d"].isnan().all()
    assert case["d_16"].isnan().all()


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("form", [PRODUCTS[0], SUMS[0], f"{WGRAD}(a, b, d)"])
@pytest.mark.parametrize("k", [K, 0])
def test_what_is_written_has_no_gradient(form, is_leaf, k):
    case = dense(k=k)
    d = case["d"].requires_grad_()
    case["d"] = d if is_leaf else d.clone()
    with pytest.raises(ValueError, match=r"(d|out) must not require a gradient"):
        called(form, case)
    assert case["d"].isnan().all()


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("form", [GROUPED[0], GROUPED_SUMS[0], GROUPED[7], GROUPED_SUMS[3]])
def test_groups_that_are_written_have_no_gradient(form, is_leaf):
    for ks in (FEW, MANY, (0, 0)):
        case = grouped(ks=ks)
        d = case["d"].requires_grad_()
        case["d"] = d if is_leaf else d.clone()
        with pytest.raises(ValueError, match="d must not require a gradient"):
            called(form, case)
        assert case["d"].isnan().all()


def test_names_are_those_of_deep_gemm():
    for name in (
        "k_grouped_fp8_gemm_nt_contiguous",
        "k_grouped_fp8_gemm_tn_contiguous",
        "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",
        "wgrad_gemm_fp8_fp8_fp32_nt",
    ):
        assert name in deep_gemm.__all__
        assert getattr(deep_gemm, name).__name__ == name
