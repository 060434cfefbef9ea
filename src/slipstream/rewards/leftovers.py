"""Removes what an untrusted program may leave in a folder: trees of any depth, without rights, with links."""

import os
import stat


def remove_folder(folder: str) -> None:
    """Remove a folder, however deep, with everything in it. Raises OSError if something cannot be removed.

    Folders are emptied into the top one until none is left: their depth then needs neither recursion nor a path, which
    the kernel would find too long. Rights that were taken away are restored; links are not followed.
    """
    name_of_moved = f"moved-{os.urandom(8).hex()}-"
    number = 0
    top = _open_folder(folder, None)
    try:
        while names := os.listdir(top):
            for name in names:
                if not _is_folder(name, top):
                    os.unlink(name, dir_fd=top)
                    continue
                inner = _open_folder(name, top)
                try:
                    for child in os.listdir(inner):
                        number += 1
                        if _is_folder(child, inner):
                            os.close(_open_folder(child, inner))  # its rights are needed to move it
                        os.rename(child, f"{name_of_moved}{number}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _open_folder(name: str, inside: int | None) -> int:
    if os.geteuid() != 0:  # root needs no rights, and must not be led to change those of another file
        os.chmod(name, 0o700, dir_fd=inside)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)


def _is_folder(name: str, inside: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode)
