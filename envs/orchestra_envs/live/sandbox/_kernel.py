"""What the sandbox asks of the Linux kernel, by ctypes: namespaces, mounts, Landlock, seccomp, capabilities.

Runs in the launcher (`python -I -S -E`), so it imports nothing but built-in modules and ctypes, which keeps the start
short. Every function raises `OSError` with the name of what failed.
"""

import ctypes
import os
import struct

PR_SET_KEEPCAPS = 8
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CAP_DAC_READ_SEARCH = 2

CLONE_NEWNS = 0x20000
NAMESPACES = {
    "user_namespace": 0x10000000,
    "pid_namespace": 0x20000000,
    "mount_namespace": CLONE_NEWNS,
    "net_namespace": 0x40000000,
    "ipc_namespace": 0x8000000,
    "uts_namespace": 0x4000000,
}

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

MACHINE = os.uname().machine
# machine: (audit name of its calls, index into the pairs of numbers below)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Calls newer than this are answered as an older kernel would: a filter cannot judge what it does not know.
_LAST_KNOWN_CALL = 450

# name: number on x86_64, on aarch64 (-1: it has none)
_CALLS = {
    # sockets: none can be made but a pair of connected ones
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "recvmsg": (47, 212), "recvmmsg": (299, 243), "socketpair": (53, 199),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "ioprio_set": (251, 30), "prlimit64": (302, 261),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "setns": (308, 268), "unshare": (272, 97),
    "clone": (56, 220), "clone3": (435, 435), "sethostname": (170, 161), "setdomainname": (171, 162),
    # large and rarely used parts of the kernel
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0), "io_submit": (209, 2),
    "io_destroy": (207, 1), "io_cancel": (210, 3), "io_getevents": (208, 4), "io_pgetevents": (333, 292),
    "seccomp": (317, 277), "modify_ldt": (154, -1), "personality": (135, 92), "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42), "uselib": (134, -1), "ustat": (136, -1), "sysfs": (139, -1), "_sysctl": (156, -1),
    "create_module": (174, -1), "get_kernel_syms": (177, -1), "query_module": (178, -1),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "iopl": (172, -1), "ioperm": (173, -1), "vhangup": (153, 58),
    # files past their names, and news of files that cannot be opened
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "inotify_init": (253, -1), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    # memory that no limit counts, and that outlives its process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # signals
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    # metadata of files, which Landlock does not guard
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1), "fchown": (93, 55),
    "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1), "utimensat": (280, 88),
    "futimesat": (261, -1), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45),
    # others
    "fcntl": (72, 25), "ioctl": (16, 29), "prctl": (157, 167), "capset": (126, 91),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip

_JUDGED_BY_ARGUMENTS = {
    "socketpair", "clone", "clone3", "prlimit64", "setpriority", "sched_setaffinity", "sched_setscheduler",
    "sched_setparam", "sched_setattr", "fcntl", "ioctl", "prctl",
}  # fmt: skip
_SIGNALS = {"kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"}
_METADATA = {
    "chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat", "utime", "utimes", "utimensat",
    "futimesat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
}  # fmt: skip
_ALLOWED = {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "capset"}


def has_known_calls() -> bool:
    """Whether the numbers of this machine's system calls are known here."""
    return MACHINE in _ARCHITECTURES


def _number(name: str) -> int:
    if not has_known_calls():
        raise OSError(38, f"system calls of {MACHINE} are not known here")
    return _CALLS[name][_ARCHITECTURES[MACHINE][1]]


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(name: str, *arguments: "int | bytes | None") -> int:
    """The system call `name`; OSError if it fails."""
    words = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(_number(name)), *words), name)


def prctl(option: int, *arguments: int) -> None:
    """prctl(2)."""
    words = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(ctypes.c_int(option), *words), f"prctl({option})")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def map_self(uid: int, gid: int) -> None:
    """In a new user namespace: be `uid` and `gid` there as outside, and nobody else."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def drop_capabilities(kept: int = 0) -> None:
    """Give up every capability but those in the mask `kept`."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)
    data = ctypes.create_string_buffer(struct.pack("=IIIIII", kept, kept, 0, 0, 0, 0), 24)
    _check(_libc.syscall(ctypes.c_long(_number("capset")), header, data), "capset")


def unused_uid(serial: int) -> int:
    """A user id that nobody has, different for different `serial`s (process ids).

    From 0x70000000, which no convention gives to anyone; in a container with fewer ids, from the end of what it has.
    """
    end = 0
    with open("/proc/self/uid_map") as file:
        for line in file:
            first, _, count = (int(word) for word in line.split())
            end = max(end, first + count)
    if end > 0x70400000:
        return 0x70000000 + serial % 0x400000
    if end < 4:
        raise OSError(1, "setresuid: this user namespace has no user id to spare")
    spare = min(30000, end // 2)
    return end - 3 - serial % spare


def _mount(source: str, target: str, kind: "str | None", flags: int, data: str = "") -> None:
    encoded = [word.encode() if word is not None else None for word in (source, target, kind)]
    result = _libc.mount(*map(ctypes.c_char_p, encoded), ctypes.c_ulong(flags), ctypes.c_char_p(data.encode()))
    _check(result, f"mount of {target}")


def _make_read_only(path: str, *, recursive: bool, devices: bool = False) -> None:
    attributes = _MS_RDONLY | _MS_NOSUID | (0 if devices else _MS_NODEV)
    data = struct.pack("=QQQQ", attributes, 0, 0, 0)
    buffer = ctypes.create_string_buffer(data, len(data))
    number = ctypes.c_long(_number("mount_setattr"))
    flags = _AT_RECURSIVE if recursive else 0
    path_word, size = ctypes.c_char_p(path.encode()), ctypes.c_size_t(len(data))
    _check(_libc.syscall(number, ctypes.c_int(-100), path_word, ctypes.c_uint(flags), buffer, size), "mount_setattr")


def make_mounts_private() -> None:
    """In a new mount namespace: what is mounted from here on is seen nowhere else."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def build_root(shared: "list[str]", devices: "list[str]", fill, *, work: str, work_bytes: int, uid: int, gid: int):
    """Replace the root by an empty one with `shared` bound read-only and an own file system at `work`.

    In a new mount namespace, with the capability to mount in it. `fill(root)` may add files to the new root before
    it becomes read-only. Symbolic links among `shared` are copied.
    """
    make_mounts_private()
    sources = [(path, os.open(path, os.O_PATH)) for path in (*shared, *devices) if not os.path.islink(path)]
    links = [(path, os.readlink(path)) for path in shared if os.path.islink(path)]
    base = next(path for path in ("/tmp", "/mnt", "/var", "/home", "/usr") if os.path.isdir(path))
    _mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4m,mode=755")
    for path, target in links:
        os.makedirs(base + os.path.dirname(path), mode=0o755, exist_ok=True)
        os.symlink(target, base + path)
    for path, handle in sources:
        source, target = f"/proc/self/fd/{handle}", base + path
        if os.path.isdir(source):
            os.makedirs(target, mode=0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        _mount(source, target, None, _MS_BIND | _MS_REC)
        if path not in devices:
            _make_read_only(target, recursive=True)
        os.close(handle)
    fill(base)
    os.mkdir(base + work, 0o700)
    options = f"size={work_bytes},nr_inodes=4096,mode=700,uid={uid},gid={gid}"
    _mount("tmpfs", base + work, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    _make_read_only(base, recursive=False)
    os.chdir(base)
    _check(_libc.syscall(ctypes.c_long(_number("pivot_root")), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount")
    os.chdir("/")


# Landlock. Rights by the version of the interface that brought them.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_RIGHTS_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
SCOPE_VERSION = 6


def landlock_version() -> int:
    """The version of the kernel's Landlock interface; OSError if it has none or it is switched off."""
    return call("landlock_create_ruleset", None, 0, 1)


def landlock(rules: "list[tuple[str, str]]", version: int) -> None:
    """Confine this process and its children for good: files by `rules`, no TCP, no signals out.

    Args:
        rules: (path, kind); kind is "read" (also run), "list" (a directory's names), "use" (read and write, for
            devices) or "work" (everything but making devices and sockets and running programs). What is missing on
            the machine is left out.
        version: of the interface, as `landlock_version` tells; older ones guard less.
    """
    handled = sum(rights for since, rights in _FILE_RIGHTS.items() if version >= since)
    kinds = {
        "read": EXECUTE | READ_FILE | READ_DIR,
        "list": READ_DIR,
        "use": READ_FILE | WRITE_FILE,
        "work": handled & ~(EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK | 1 << 15),
    }
    ruleset = _ruleset(handled, version)
    for path, kind in rules:
        _allow(ruleset, path, kinds[kind])
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def landlock_signals(work: str) -> None:
    """Confine this process further: no signals to processes outside of it (from version 6 on).

    Every layer of Landlock forbids moving files between directories unless it says otherwise, hence `work`.
    """
    ruleset = _ruleset(_FILE_RIGHTS[2], SCOPE_VERSION)
    _allow(ruleset, work, _FILE_RIGHTS[2])
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _ruleset(handled: int, version: int) -> int:
    network, scopes = (3 if version >= 4 else 0), (3 if version >= SCOPE_VERSION else 0)
    words = [handled, network, scopes][: 1 + (version >= 4) + (version >= SCOPE_VERSION)]
    attribute = struct.pack(f"={len(words)}Q", *words)
    return call("landlock_create_ruleset", attribute, len(attribute), 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not os.path.isdir(path):
            rights &= _RIGHTS_OF_FILES
        call("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


# seccomp: classic BPF over (number, architecture, instruction pointer, six arguments)
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _AND, _RETURN = (
    0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06,
)  # fmt: skip
_ALLOW, _KILL, _PASS_OVER, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x80000000, 0x50000, 0x50001, 0x50026
_NEW_NAMESPACE_BITS = 0x7E020000


def seccomp_filter(*, pid: int = 0, guard_metadata: bool = False, guard_truncate: bool = False) -> bytes:
    """The program of the filter, as the kernel reads it.

    Args:
        pid: 0 if something else guards signals; otherwise the only process that may be sent one.
        guard_metadata: changes of mode, owner, times and attributes of files pass without effect.
        guard_truncate: truncate(2) by name is refused (Landlock guards it from version 3 on).
    """
    architecture, column = _ARCHITECTURES[MACHINE]
    program: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0),
        (_JUMP_GREATER_EQUAL, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL),
        (_JUMP_GREATER, 0, 1, _LAST_KNOWN_CALL), (_RETURN, 0, 0, _UNKNOWN),
    ]  # fmt: skip

    def when(name: str, body: "list[tuple[int, int, int, int]]") -> None:
        number = _CALLS[name][column]
        if number >= 0:
            program.append((_JUMP_EQUAL, 0, len(body), number))
            program.extend(body)

    def argument(index: int, accept: "list[tuple[int, int, int, int]]") -> "list[tuple[int, int, int, int]]":
        return [(_LOAD, 0, 0, 16 + 8 * index), *accept]

    refused, allowed = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)

    def only(index: int, value: int) -> "list[tuple[int, int, int, int]]":
        return [*argument(index, [(_JUMP_EQUAL, 1, 0, value), refused])]

    def none_of(index: int, values: "list[int]") -> "list[tuple[int, int, int, int]]":
        tests = [t for value in values for t in ((_JUMP_EQUAL, 0, 1, value), refused)]
        return [*argument(index, tests), allowed]

    whole = set(_CALLS) - _JUDGED_BY_ARGUMENTS - _SIGNALS - _METADATA - _ALLOWED - {"truncate"}
    for name in sorted(whole | ({"truncate"} if guard_truncate else set())):
        when(name, [refused])
    for name in sorted(_METADATA if guard_metadata else ()):
        when(name, [(_RETURN, 0, 0, _PASS_OVER)])
    when("clone3", [(_RETURN, 0, 0, _UNKNOWN)])  # its flags lie in memory; libc then takes clone
    when("clone", argument(0, [(_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACE_BITS), refused, allowed]))
    connected_pair = argument(1, [(_AND, 0, 0, 0xF), (_JUMP_EQUAL, 1, 0, 1), refused, allowed])
    when("socketpair", [*only(0, 1), *connected_pair])
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        when(name, [*only(0, 0), allowed])  # 0: the process itself
    when("setpriority", [*only(0, 0), *only(1, 0), allowed])
    when("fcntl", none_of(1, [8, 10, 15, 1024, 1026]))  # SETOWN, SETSIG, SETOWN_EX, SETLEASE, NOTIFY
    when("ioctl", none_of(1, [0x8901, 0x8902, 0x5412, 0x541C]))  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX
    when("prctl", none_of(0, [4, 35, 0x59616D61]))  # SET_DUMPABLE (hides from the supervisor), SET_MM, SET_PTRACER
    if pid:
        when("kill", argument(0, [(_JUMP_EQUAL, 2, 0, pid), (_JUMP_EQUAL, 1, 0, 0), refused, allowed]))
        when("tgkill", argument(0, [(_JUMP_EQUAL, 1, 0, pid), refused, allowed]))
        for name in sorted(_SIGNALS - {"kill", "tgkill"}):
            when(name, [refused])
    program.append(allowed)
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def seccomp(program: bytes) -> None:
    """Put a filter on this process and its children for good; `no_new_privs` must be set."""
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(head, len(head))
    number, zero = ctypes.c_long(_number("seccomp")), ctypes.c_uint(0)
    _check(_libc.syscall(number, ctypes.c_uint(1), zero, buffer), "seccomp")
