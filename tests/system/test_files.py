"""Files that only we or root may write; published and locked ones: tests/kernels/jit."""

import os
from pathlib import Path

import pytest

from moefp8.system.files import require_ours


@pytest.mark.parametrize(
    ("owner", "mode", "told"),
    [
        (1000, 0o100644, None),
        (0, 0o100644, None),
        (0, 0o40755, None),
        (1001, 0o100644, "another user"),
        (0, 0o100664, "others may write"),
        (1000, 0o100646, "others may write"),
    ],
)
def test_root_may_own_what_we_run(monkeypatch, owner, mode, told):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status = os.stat_result([mode, 1, 1, 1, owner, 1, 1, 0, 0, 0])
    if told:
        with pytest.raises(PermissionError, match=told):
            require_ours(Path("entry"), status)
    else:
        require_ours(Path("entry"), status)
