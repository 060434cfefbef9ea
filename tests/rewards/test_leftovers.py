"""Removing what a program left in its folder."""

import os
from pathlib import Path

from slipstream.rewards.leftovers import remove_folder


def test_links_closed_folders_and_files_are_removed_and_what_links_point_to_is_not(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("stays")
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("goes")
    (folder / "a" / "to-folder").symlink_to(outside)
    (folder / "to-file").symlink_to(outside / "file")
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    remove_folder(str(folder))
    assert not folder.exists()
    assert (outside / "file").read_text() == "stays"


def test_a_folder_deeper_than_a_path_may_be_long_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=here)
        inner = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    remove_folder(str(folder))
    assert not folder.exists()
