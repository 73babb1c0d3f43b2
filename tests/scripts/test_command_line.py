"""The scripts' errors about folders that they cannot write to."""

import argparse

import pytest

import command_line


@pytest.fixture
def complaint(capsys):
    """Return what a check says, None if it passes."""

    def check(function, path):
        try:
            function(argparse.ArgumentParser(), "--output", path)
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err.splitlines()[-1].split("error: ")[1]

    return check


def test_a_folder_that_can_be_made_is_not_made_yet(complaint, tmp_path):
    new = tmp_path / "a" / "b"
    assert complaint(command_line.check_folder, tmp_path) is None
    assert complaint(command_line.check_folder, new) is None
    assert complaint(command_line.check_file, new) is None
    assert not list(tmp_path.iterdir())


def test_a_folder_below_a_file(complaint, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert complaint(command_line.check_folder, file / "new") == (
        f"--output {file / 'new'}: cannot write to {file} (Not a directory)"
    )


def test_a_folder_that_is_read_only(complaint, tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(command_line.tempfile, "TemporaryFile", refuse)
    assert complaint(command_line.check_folder, tmp_path) == (
        f"--output {tmp_path}: cannot write to {tmp_path} (Permission denied)"
    )


def test_a_file_that_is_a_folder(complaint, tmp_path):
    assert complaint(command_line.check_file, tmp_path) == (
        f"--output {tmp_path}: is a folder, not a file"
    )
