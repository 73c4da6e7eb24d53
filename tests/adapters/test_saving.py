"""What `save_lora` leaves in a directory, whatever happens meanwhile."""

import copy
import json
import os
import resource
from pathlib import Path

import pytest
import torch

from moefp8.adapters import add_lora, load_lora, lora_state_dict, remove_lora, save_lora
from tests.adapters.cases import Net, tokens, trained
from tests.adapters.files_cases import CONFIG, WEIGHTS, bare, states


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_model_without_adapters_has_nothing_to_save(tmp_path):
    assert lora_state_dict(Net()) == {}
    with pytest.raises(ValueError, match="has no adapters"):
        save_lora(Net(), tmp_path)


def test_files_are_replaced(model, saved):
    trained(model)
    save_lora(model, saved)
    x, other = tokens(), bare(model)
    load_lora(other, saved)
    assert torch.equal(other(x), model(x))


def pair(folder: Path) -> tuple[bytes, bytes]:
    return (folder / WEIGHTS).read_bytes(), (folder / CONFIG).read_bytes()


class Killed(BaseException):
    """A process ends; what it would do in `finally` is left out, too."""


def killed_before(monkeypatch, number: int, run) -> bool:
    """Whether `run` came to the call of that number among those that rename, remove and sync."""
    left = [number]

    def counted(real):
        def call(*args, **options):
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "unlink", "remove", "link", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            run()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("alpha", [8, 32])
def test_a_killed_save_pairs_no_weights_with_settings_of_others(
    model, saved, tmp_path, monkeypatch, alpha
):
    new, old = remove_lora(copy.deepcopy(model)), pair(saved)
    add_lora(new, 4, alpha, targets=["first", "experts", "head"])
    save_lora(trained(new), tmp_path / "new")
    outcomes, is_killed = [], True
    while is_killed:
        save_lora(model, saved)
        assert pair(saved) == old
        number = len(outcomes) + 1
        is_killed = killed_before(monkeypatch, number, lambda: save_lora(new, saved))
        if (saved / CONFIG).exists():
            outcomes.append({old: "old", pair(tmp_path / "new"): "new"}[pair(saved)])
        else:
            outcomes.append("refused")
            with pytest.raises(FileNotFoundError, match=r"adapter_config\.json is missing.*killed"):
                load_lora(bare(model), saved)
    assert outcomes == sorted(outcomes, key=["old", "refused", "new"].index)
    assert {outcomes[0], outcomes[-1]} == {"old", "new"}
    assert ("refused" in outcomes) == (alpha == 32)  # the same settings stay where they are


@pytest.mark.parametrize("fails", ["replace", "fsync"])
@pytest.mark.parametrize("has_old", [True, False])
def test_a_save_that_fails_changes_nothing(model, saved, monkeypatch, has_old, fails):
    before = contents(saved)
    add_lora(other := bare(model), 2, 4)
    if not has_old:
        before = {"notes.txt": b"kept"}
        for file in saved.iterdir():
            file.unlink()
        (saved / "notes.txt").write_bytes(b"kept")
    real = getattr(os, fails)

    def call(*args, **options):
        if fails == "fsync" or Path(args[1]).name == WEIGHTS:
            raise OSError(5, "Input/output error")
        return real(*args, **options)

    monkeypatch.setattr(os, fails, call)
    with pytest.raises(OSError, match=r"save_lora: .*adapter.* \(Input/output error\)"):
        save_lora(other, saved)
    assert contents(saved) == before


def test_a_full_disk_is_an_error_that_names_the_directory(model, saved):
    before, limits = contents(saved), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            save_lora(trained(model), saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(saved) in str(raised.value)
    assert contents(saved) == before


def test_a_save_while_files_are_read_is_seen(model, saved, monkeypatch):
    add_lora(new := bare(model), 4, 32, targets=["first", "experts", "head"])
    read, saves = json.loads, [lambda: save_lora(new, saved)]

    def loads(text, **options):
        settings = read(text, **options)
        if saves:
            saves.pop()()
        return settings

    monkeypatch.setattr(json, "loads", loads)
    other = bare(model)
    with pytest.raises(ValueError, match=r"load_lora: .* was written while it was read; load"):
        load_lora(other, saved)
    assert states(other) == []
    load_lora(other, saved)
    assert other.first.lora_weight.alpha == 32
