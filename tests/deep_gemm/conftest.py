"""Settings of the process are put back behind every test."""

import pytest

import moefp8.deep_gemm as deep_gemm


@pytest.fixture(autouse=True)
def _settings():
    yield
    deep_gemm.set_num_sms(0)
    deep_gemm.set_tc_util(100)
    deep_gemm.set_pdl(False)
    deep_gemm.set_compile_mode(0)
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)
