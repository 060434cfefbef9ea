"""The system calls that a sandboxed program is refused, as a filter for the kernel (seccomp).

The namespaces of `isolation.py` keep a program from what is outside. The filter closes what they leave open: memory
that no limit counts (memfd, System V segments), reading and steering other processes, new namespaces, and parts of the
kernel that no program of this kind needs. Where there are no namespaces it is also what refuses the network.

The numbers are those of the kernel's asm/unistd_64.h (x86-64) and asm-generic/unistd.h (arm64).
"""

import errno
import platform
import struct

# Name: (number on x86-64, number on arm64).
REFUSED_CALLS: dict[str, tuple[int, int]] = {
    # Network. `socketpair` stays: it reaches nobody outside, and asyncio needs it.
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # Memory that belongs to no address space, so that no limit counts it.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Parts of the kernel that have been ways out before, or that only an administrator uses.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "personality": (135, 92),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}

PRLIMIT = (302, 261)
CLONE = (56, 220)
CLONE3 = (435, 435)
NEW_NAMESPACES = 0x7E020080  # the CLONE_NEW* flags of clone(2), time namespaces included
X32_BIT = 0x40000000  # numbers of the x32 calls, a second door to the same calls on x86-64

AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}

# Opcodes of classic BPF and what a filter may answer (linux/bpf_common.h, linux/seccomp.h).
LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16


def system_call_filter(machine: str | None = None) -> bytes | None:
    """Return the filter as an array of `struct sock_filter`, None for a processor whose numbers are not known.

    Refused calls fail with EPERM; `clone3` with ENOSYS, so that the C library falls back to `clone`, whose flags a
    filter can read. `machine` is as `platform.machine()` names it, by default this one.
    """
    machine = platform.machine() if machine is None else machine
    if machine not in COLUMN:
        return None
    column = COLUMN[machine]
    refuse = _instruction(RETURN, REFUSE | errno.EPERM)
    program = [
        _instruction(LOAD_WORD, ARCHITECTURE_OFFSET),
        _instruction(JUMP_EQUAL, AUDIT_ARCHITECTURE[machine], when_true=1),
        _instruction(RETURN, KILL),  # a call in the numbering of another architecture would pass the list below
        _instruction(LOAD_WORD, NUMBER_OFFSET),
        _instruction(JUMP_AT_LEAST, X32_BIT, when_false=1),
        refuse,
    ]
    for numbers in REFUSED_CALLS.values():
        program += [_instruction(JUMP_EQUAL, numbers[column], when_false=1), refuse]
    program += [
        _instruction(JUMP_EQUAL, CLONE3[column], when_false=1),
        _instruction(RETURN, REFUSE | errno.ENOSYS),
        # The limits of another process: with those of the one that watches it, a program could stop it from going on.
        _instruction(JUMP_EQUAL, PRLIMIT[column], when_false=4),
        _instruction(LOAD_WORD, FIRST_ARGUMENT_OFFSET),
        _instruction(JUMP_EQUAL, 0, when_false=1),
        _instruction(RETURN, ALLOW),
        refuse,
        _instruction(JUMP_EQUAL, CLONE[column], when_false=3),
        _instruction(LOAD_WORD, FIRST_ARGUMENT_OFFSET),
        _instruction(JUMP_ANY_BIT, NEW_NAMESPACES, when_false=1),
        refuse,
        _instruction(RETURN, ALLOW),
    ]
    return b"".join(program)


def _instruction(code: int, operand: int, *, when_true: int = 0, when_false: int = 0) -> bytes:
    """One `struct sock_filter`; jumps count the instructions to skip."""
    return struct.pack("=HBBI", code, when_true, when_false, operand)
