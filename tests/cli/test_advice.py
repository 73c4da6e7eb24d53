"""What commands advise: it works, and errors name options as the command line has them."""


import pytest

from moefp8.cli.main import main
from tests.checkpoint.inspect.cases import headers_only

LAYER = "model.layers.0.mlp"
MATRIX = {f"{LAYER}.up_proj.weight": ("BF16", [8, 8])}
FOREIGN = {
    "16 bits": MATRIX,
    "integers": {f"{LAYER}.up_proj.weight": ("U8", [8, 8])},
    "NVFP4": {
        f"{LAYER}.up_proj.weight": ("U8", [8, 8]),
        f"{LAYER}.up_proj.weight_scale": ("F8_E4M3", [8, 1]),
    },
    "MXFP4": {
        f"{LAYER}.experts.down_proj_blocks": ("U8", [2, 8, 1, 16]),
        f"{LAYER}.experts.down_proj_scales": ("U8", [2, 8, 1]),
    },
    "8 bits of another format": {f"{LAYER}.up_proj.weight": ("F8_E5M2", [8, 8])},
    "no layer": {"model.norm.weight": ("BF16", [8])},
    "experts of another make": {
        f"{LAYER}.experts.gate_up_proj": ("BF16", [2, 8, 8]),
        f"{LAYER}.experts.down_proj": ("BF16", [2, 8, 8]),
    },
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_inspect_advises_quantize_where_that_works(kind, tmp_path, capsys):
    path = headers_only(tmp_path / "model.safetensors", FOREIGN[kind])
    main(["inspect", str(path)])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("FP8 ")]
    status = main(["quantize", str(path), str(tmp_path / "t")])
    errors = capsys.readouterr().err
    assert ("`moefp8 quantize` makes one of it" in line) == (status == 0)
    assert (status == 0) == (kind == "16 bits")
    if status:
        assert line.partition("refuses it: ")[2] in errors
        assert line.partition("refuses it: ")[2]
