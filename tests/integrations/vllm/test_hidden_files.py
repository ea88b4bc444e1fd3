"""Rows as files: complete or absent, with names that clients may send, limited by bytes and age."""

from __future__ import annotations

import os
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from pc.integrations.vllm import hidden_files
from pc.integrations.vllm.hidden_files import RowsFolder, file_name


def rows(value=1.0, count=3, width=4):
    return {"hidden_states": torch.full((count, width), float(value)), "token_ids": torch.arange(count)}


def read(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_a_file_for_each_request(tmp_path):
    folder = RowsFolder(tmp_path / "made" / "here")
    for n in range(5):
        folder.put(f"cmpl-{n}-0", rows(n), {"complete": "true"})
    folder.close()
    assert sorted(os.listdir(folder.path)) == [f"cmpl-{n}-0.safetensors" for n in range(5)]
    for n in range(5):
        found, metadata = read(folder.path / file_name(f"cmpl-{n}-0"))
        assert torch.equal(found["hidden_states"], rows(n)["hidden_states"])
        assert metadata == {"complete": "true"}


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a\0b", "x" * 5000, "ä/é\n", "%2F"])
def test_what_clients_send_as_an_id_stays_inside(tmp_path, name):
    folder = RowsFolder(tmp_path / "in")
    folder.put(name, rows(), {})
    folder.close()
    assert os.listdir(tmp_path) == ["in"]
    (found,) = os.listdir(folder.path)
    assert found == file_name(name)
    assert len(found) < 256


def test_ids_that_differ_have_files_that_differ():
    names = ["a/b", "a%2Fb", "a b", "a+b", "x" * 201, "x" * 202, "X" * 201]
    assert len({file_name(name) for name in names}) == len(names)


def test_the_oldest_go_beyond_the_bytes(tmp_path):
    size = len(save(rows(), {"complete": "true"}))
    folder = RowsFolder(tmp_path, max_bytes=16 * size)
    for n in range(40):
        folder.put(f"{n:02}", rows(n), {"complete": "true"})
        folder._writer.submit(lambda n=n: os.utime(tmp_path / file_name(f"{n:02}"), (time.time() - 100 + n,) * 2))
        folder._writer.submit(lambda: None).result()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 16 * size
    folder.close()
    left = sorted(os.listdir(tmp_path))
    assert 10 < len(left) <= 16
    assert left == [file_name(f"{n:02}") for n in range(40 - len(left), 40)]
    large = RowsFolder(tmp_path, max_bytes=1)
    large.put("large", rows(count=100), {})
    large.close()
    assert os.listdir(tmp_path) == ["large.safetensors"]


def test_what_is_old_goes_and_what_is_not_ours_stays(tmp_path):
    now = time.time()
    ages = {"old.safetensors": 120, "new.safetensors": 30, ".killed.part": 1000, ".running.part": 30, "notes.txt": 9e6}
    for name, age in ages.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (now - age, now - age))
    folder = RowsFolder(tmp_path, max_seconds=60)
    folder.put("r", rows(), {})
    folder.close()
    assert sorted(os.listdir(tmp_path)) == [".running.part", "new.safetensors", "notes.txt", "r.safetensors"]


def test_what_cannot_be_deleted_stays_and_older_files_go(tmp_path, warnings):
    """Such as a folder, or another user's file in a shared folder."""
    now = time.time()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "old.safetensors").write_bytes(b"x")
    for name, age in {"folder.safetensors": 120, "old.safetensors": 240}.items():
        os.utime(tmp_path / name, (now - age, now - age))
    folder = RowsFolder(tmp_path, max_seconds=60)
    folder.put("r", rows(), {})
    folder.close()
    assert sorted(os.listdir(tmp_path)) == ["folder.safetensors", "r.safetensors"]
    assert not warnings


def test_a_disk_that_refuses_is_reported_and_leaves_nothing(tmp_path, monkeypatch, warnings):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    folder = RowsFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(hidden_files, "save_file", full)
        folder.put("lost", rows(), {})
        folder._writer.submit(lambda: None).result()
    folder.put("kept", rows(), {})
    folder.close()
    assert os.listdir(tmp_path) == ["kept.safetensors"]
    assert folder._pending == 0
    (said,) = warnings
    assert "hidden states of lost are not written" in said
    assert "No space left" in said


def test_what_waits_to_be_written_is_bounded(tmp_path, monkeypatch, warnings):
    import threading

    let_go, save = threading.Event(), hidden_files.save_file
    monkeypatch.setattr(hidden_files, "save_file", lambda *given: (let_go.wait(30), save(*given)))
    folder = RowsFolder(tmp_path, pending_bytes=200)
    for n in range(6):
        folder.put(str(n), rows(n), {})
    let_go.set()
    folder.close()
    assert sorted(os.listdir(tmp_path)) == ["0.safetensors", "1.safetensors"]
    assert warnings == ["hidden states are dropped: more than 200 bytes wait to be written"]


def test_a_folder_of_a_model_is_refused(tmp_path):
    """Its weights are safetensors files too, and old ones are deleted."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"pc_hidden_states_dir: got .*, the folder of a model, needs one of its own"):
        RowsFolder(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RowsFolder(tmp_path / "file" / "folder")
