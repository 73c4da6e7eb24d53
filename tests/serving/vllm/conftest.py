"""One process as vLLM's worker has it, for tests of layers. They are skipped without vLLM."""

import pytest
import torch


@pytest.fixture(scope="package")
def worker(tmp_path_factory):
    """vLLM's config and groups of one rank, with the plug-in; its layers can be made."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    from moefp8.serving.vllm.config import register_layers
    from moefp8.serving.vllm.model import why_not_here

    if reason := why_not_here():
        pytest.skip(reason)
    register_layers()
    store = tmp_path_factory.mktemp("groups") / "store"
    backend = "nccl" if current_platform.is_cuda() else "gloo"
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, backend)
        initialize_model_parallel(1)
        yield config
    torch.distributed.destroy_process_group()
