"""The process that a call of the sandbox starts: it locks itself up, runs the code and watches it.

Three processes: the supervisor (this one, outside the walls), the warden (inside, first of the new process tree; it
reaps, and kills everything at the end), and the program (inside, one wall further in: it cannot signal or trace the
warden). The request comes as one `marshal` value on standard input, which then stays open for as long as the caller
lives; the answer goes to standard output as lines of "key value", an empty line, and what the program printed.
The program holds neither of the two: its output comes to the supervisor through a pipe, its exit status from waitpid.

Runs under `python -I -S -E` and imports built-in modules and its two neighbours only.
"""

import _ast
import _signal
import errno
import marshal
import os
import resource
import select
import sys
import time

import _files
import _kernel as kernel

WORK = "/sandbox"
PACKAGES = "/packages"
PROGRAM = "program.py"
MAX_FILES = 4096
_TICK_S = 0.05
_GRACE_S = 5.0
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_NOT_SHARED = {"site-packages", "dist-packages", "test", "__pycache__"}
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CLOCK_HZ = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Read a request, serve it, answer."""
    size = int.from_bytes(_read_exactly(0, 8), "big")
    request = marshal.loads(_read_exactly(0, size))
    try:
        report, output = probe(request["missing"]) if "missing" in request else supervise(request)
    except Exception as error:
        report, output = {"failed": f"{type(error).__name__}: {error}".replace("\n", " ")}, b""
    head = "".join(f"{key} {value}\n" for key, value in report.items())
    answer = memoryview(head.encode(errors="replace") + b"\n" + output)
    try:
        while answer:
            answer = answer[os.write(1, answer) :]
    except BrokenPipeError:  # nobody is left to read it
        pass


def _read_exactly(handle: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.read(handle, min(size, 1 << 20))
        if not part:
            os._exit(3)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# The supervisor.


def supervise(request: dict) -> "tuple[dict, bytes]":
    """Run `request["code"]` behind the walls asked for; the report and the first bytes of what it printed."""
    start_s = time.monotonic()
    request["uid"] = kernel.unused_uid(os.getpid()) if request["drop_root"] else os.getuid()
    request["gid"] = request["uid"] if request["drop_root"] else os.getgid()
    box = request["box"] if not request["namespaces"] else ""
    if box:
        make_box(box, request)
    try:
        report, output = _watch(request, *_start(request), box)
    finally:
        if box:
            _files.remove_tree(box)
    report["wall_s"] = f"{time.monotonic() - start_s:.6f}"
    return report, output


def _start(request: dict) -> "tuple[int, int, int, int]":
    """Fork the warden: its pid (0: it could not be), the pipes of the output and of reports, its lifeline."""
    output_r, output_w = os.pipe()
    report_r, report_w = os.pipe()
    alive_r, alive_w = os.pipe()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    supervisor, warden = os.getpid(), 0
    try:
        if request["namespaces"]:
            enter_namespaces(request["namespaces"], kernel.NAMESPACES["pid_namespace"])
        warden = os.fork()
    except OSError as error:
        os.write(report_w, f"failed {error}\n".encode())
    if warden == 0 and os.getpid() != supervisor:
        _close(output_r, report_r, alive_w)
        _in_child(lambda: _warden(request, supervisor, output_w, report_w, alive_r), report_w)
    _close(output_w, report_w, alive_r)
    return warden, output_r, report_r, alive_w


def _close(*handles: int) -> None:
    for handle in handles:
        os.close(handle)


def _in_child(action, report_w: int) -> None:
    """`action()` in a forked process that ends with it, whatever it raises."""
    try:
        action()
    except BaseException as error:
        _tell(report_w, f"failed {type(error).__name__}: {error}".replace("\n", " ")[:900] + "\n")
        os._exit(1)
    os._exit(0)


class _Output:
    """What the program printed: its first bytes, and how many there were."""

    def __init__(self, handle: int, max_bytes: int) -> None:
        self.handle, self.max_bytes, self.num_bytes, self.open = handle, max_bytes, 0, True
        self.parts: list[bytes] = []

    def read(self) -> bool:
        """Take in what waits; whether there was something."""
        part = os.read(self.handle, 1 << 16)
        self.open = bool(part)
        if self.num_bytes < self.max_bytes:
            self.parts.append(part[: self.max_bytes - self.num_bytes])
        self.num_bytes += len(part)
        return self.open


def _watch(request: dict, warden: int, output_r: int, report_r: int, alive_w: int, box: str) -> "tuple[dict, bytes]":
    limits = request["limits"]
    output, reports, limit = _Output(output_r, limits["output_bytes"]), b"", ""
    poller = select.poll()
    poller.register(0, 0)  # POLLHUP alone: the caller is gone
    poller.register(output_r, select.POLLIN)
    poller.register(report_r, select.POLLIN)
    deadline_s = time.monotonic() + limits["wall_s"]
    look_s = time.monotonic() + _TICK_S
    over = not warden
    while not over and not limit:
        now_s = time.monotonic()
        events = dict(poller.poll(max(0.0, min(deadline_s, look_s) - now_s) * 1000 + 1))
        if output_r in events and not output.read():
            poller.unregister(output_r)
        if report_r in events:
            part = os.read(report_r, 4096)
            reports += part
            over = not part or b"ended\n" in reports
        now_s = time.monotonic()
        if over:
            break
        if 0 in events:
            limit = "caller"
        elif output.num_bytes > limits["output_bytes"]:
            limit = "output"
        elif now_s >= deadline_s:
            limit = "wall"
        elif now_s >= look_s:
            limit = _exceeded(warden, limits, box)
            look_s = time.monotonic() + _TICK_S
    _end(warden, output, alive_w, private=b"private" in reports)
    while part := os.read(report_r, 4096):
        reports += part
    report = {"limit": limit, "num_bytes": output.num_bytes, "status": -1, "cpu_s": 0.0, "failed": "", "reads_all": 0}
    for line in reports.decode(errors="replace").splitlines():
        key, _, rest = line.partition(" ")
        if key == "exit":
            report["status"], report["cpu_s"] = rest.split()
        elif key in ("failed", "reads_all"):
            report[key] = rest
    return report, b"".join(output.parts)


def _end(warden: int, output: _Output, alive_w: int, *, private: bool) -> None:
    """Kill what is left of the call, reap it, and take in the rest of the output (a pipe holds little)."""
    os.close(alive_w)  # the warden kills all that can be seen from inside, then itself
    give_up_s = time.monotonic() + _GRACE_S
    while time.monotonic() < give_up_s:
        now_s = time.monotonic()
        if warden and (not private or now_s > give_up_s - _GRACE_S / 2):
            for pid in descendants(os.getpid()):
                if pid != warden or now_s > give_up_s - _GRACE_S / 2:
                    _kill(pid)
        if output.open and select.select([output.handle], [], [], 0)[0]:
            output.read()
            continue
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == warden:
            warden, private = 0, False  # whoever is left now is ours to kill
            for pid in descendants(os.getpid()):
                _kill(pid)
        elif pid == 0:
            time.sleep(0.001)
    while output.open and select.select([output.handle], [], [], 0)[0]:
        output.read()


def _kill(pid: int) -> None:
    try:  # noqa: SIM105
        os.kill(pid, _signal.SIGKILL)
    except OSError:
        pass


def descendants(pid: int) -> "list[int]":
    """The processes below `pid`, as /proc tells; [] without it."""
    found, to_do = [], [pid]
    while to_do:
        parent = to_do.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                below = [int(word) for word in _read(f"/proc/{parent}/task/{task}/children").split()]
                found += below
                to_do += below
        except OSError:
            continue
    return found


def _read(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 1 << 16)
    finally:
        os.close(handle)


def _exceeded(warden: int, limits: dict, box: str) -> str:
    """Which limit all processes of the call together are over, if any; what the kernel bounds per process only."""
    ticks = threads = memory_bytes = 0
    inside = descendants(warden)
    for pid in (warden, *inside):
        try:
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            pages = _read(f"/proc/{pid}/statm").split()
        except (OSError, ValueError):
            continue
        ticks += sum(int(field) for field in fields[11:15])
        if pid != warden:
            threads += int(fields[17])
            memory_bytes += (int(pages[1]) - int(pages[2])) * _PAGE_BYTES
    if ticks / _CLOCK_HZ > limits["cpu_s"] + 0.1:
        return "cpu"
    if threads > limits["processes"]:
        return "processes"
    if memory_bytes > limits["memory_bytes"] and _proportional_bytes(inside, memory_bytes) > limits["memory_bytes"]:
        return "memory"
    return "files" if box and _disk_bytes(box, inside, limits["file_bytes"]) > limits["file_bytes"] else ""


def _proportional_bytes(pids: "list[int]", otherwise: int) -> int:
    """Memory of these processes where shared pages count once; `otherwise` if the kernel does not tell."""
    total = 0
    for pid in pids:
        try:
            lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss_Anon"))
        except ProcessLookupError:
            continue
        except (OSError, ValueError):
            return otherwise
    return total


def _disk_bytes(box: str, pids: "list[int]", max_bytes: int) -> int:
    """What the work directory holds, files that are open but deleted included; more than `max_bytes` if too many."""
    total, num_files, to_do = 0, 0, [f"{box}/work"]
    deleted = {}
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                status = os.stat(f"/proc/{pid}/fd/{name}")
                if status.st_nlink == 0 and status.st_size:
                    deleted[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    while to_do:
        try:
            with os.scandir(to_do.pop()) as entries:
                for entry in entries:
                    num_files += 1
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if num_files > MAX_FILES or total > max_bytes:
                        return max_bytes + 1
                    if entry.is_dir(follow_symlinks=False):
                        to_do.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return max_bytes + 1
    return total + sum(deleted.values())


# The box: directories of a call where there is no mount namespace.


def make_box(box: str, request: dict) -> None:
    """Fill the (new, empty) directory `box` with work/ and packages/."""
    os.mkdir(f"{box}/work", 0o700)
    if request["drop_root"]:
        os.chmod(box, 0o711)
        os.chown(f"{box}/work", request["uid"], request["gid"])
    fill_packages(f"{box}{PACKAGES}", request)


def fill_packages(folder: str, request: dict) -> None:
    """Links to the packages that the program may import, and its own source, which tracebacks quote."""
    os.mkdir(folder, 0o755)
    for name, target in request["links"]:
        os.symlink(target, f"{folder}/{name}")
    with open(f"{folder}/{PROGRAM}", "w", encoding="utf-8", errors="replace") as file:
        file.write(request["code"])
    os.chmod(f"{folder}/{PROGRAM}", 0o644)
    os.chmod(folder, 0o755)


# The walls.


def enter_namespaces(mode: str, flags: int) -> None:
    """unshare `flags`, with a user namespace if `mode` is "user"."""
    if mode == "user":
        uid, gid = os.getuid(), os.getgid()
        kernel.unshare(kernel.NAMESPACES["user_namespace"])
        kernel.map_self(uid, gid)
    kernel.unshare(flags)


def interpreter_paths() -> "tuple[list[str], list[tuple[str, str]]]":
    """What Python itself needs: directories and files to mount, and Landlock rules for them."""
    executable = os.path.realpath(sys.executable)
    libraries = os.path.realpath(os.path.join(sys.base_prefix, "lib"))
    mounts = [executable, libraries, *_SYSTEM]
    rules = [(executable, "read"), *((path, "read") for path in _SYSTEM)]
    if libraries not in _SYSTEM:
        rules += [(f"{libraries}/{name}", "read") for name in _listdir(libraries) if ".so" in name]
    for folder in sys.path:
        folder = os.path.realpath(folder)
        if os.path.isfile(folder):
            mounts.append(folder)
            rules.append((folder, "read"))
        elif os.path.isdir(folder):
            mounts.append(folder)
            rules.append((folder, "list"))
            rules += [(f"{folder}/{name}", "read") for name in _listdir(folder) if name not in _NOT_SHARED]
            rules.append((f"{folder}/__pycache__", "read"))
    return mounts, rules


def _listdir(folder: str) -> "list[str]":
    try:
        return os.listdir(folder)
    except OSError:
        return []


def outermost(paths: "list[str]") -> "list[str]":
    """`paths` that exist, without those inside of others."""
    chosen: list[str] = []
    for path in sorted(set(paths)):
        if os.path.lexists(path) and not any(path.startswith(f"{other}/") for other in chosen):
            chosen.append(path)
    return chosen


def _confine(request: dict, supervisor: int) -> "tuple[str, bool, list[tuple[str, str]]]":
    """Put up the walls around this process.

    The work directory, whether kill(-1) hits this call alone, and the rules of Landlock still to be put in force.
    """
    targets = [target for _, target in request["links"]]
    mounts, rules = interpreter_paths()
    prefix = "" if request["namespaces"] else request["box"]
    work = WORK if request["namespaces"] else f"{prefix}/work"
    if request["namespaces"]:
        names = ("mount_namespace", "net_namespace", "ipc_namespace", "uts_namespace")
        kernel.unshare(sum(kernel.NAMESPACES[name] for name in names))
        kernel.call("sethostname", b"sandbox", 7)
        devices = [path for path in _DEVICES if os.path.exists(path)]
        kernel.build_root(
            outermost([*mounts, *targets]),
            devices,
            lambda root: fill_packages(f"{root}{PACKAGES}", request),
            work=WORK,
            work_bytes=request["limits"]["file_bytes"],
            uid=request["uid"],
            gid=request["gid"],
        )
    if request["drop_root"]:
        _become(request["uid"], [*mounts[:1], *(p for p in sys.path if p.endswith("lib-dynload")), *targets], request)
    elif request["namespaces"] or os.getuid() != 0:
        kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    os.chdir(work)
    rules += [(target, "read") for target in targets]
    rules += [(f"{prefix}{PACKAGES}", "read"), (work, "work"), *((path, "use") for path in _DEVICES)]
    private = os.getpid() == 1 or _is_out_of_reach(supervisor)
    if request["landlock"] and (private or request["landlock"] >= kernel.SCOPE_VERSION):
        kernel.landlock(rules, request["landlock"])
        private, rules = private or _is_out_of_reach(supervisor), []
    # Otherwise the warden finds the processes to kill in /proc, so that only the program gets walls around its files.
    return work, private, rules


def _become(uid: int, needed: "list[str]", request: dict) -> None:
    """Stop being root. If an unprivileged user cannot get at `needed`, keep the capability to read past permissions.

    (Where the interpreter lies in root's home; Landlock then bounds what can be read, and only it.)
    """
    kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    request["reads_all"] = any(_is_closed(path) for path in needed)
    kernel.drop_capabilities(1 << kernel.CAP_DAC_READ_SEARCH if request["reads_all"] else 0)


def _is_closed(path: str) -> bool:
    try:
        os.stat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _is_out_of_reach(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    return False


def _warden(request: dict, supervisor: int, output_w: int, report_w: int, alive_r: int) -> None:
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0), os.dup2(null, 1), os.dup2(null, 2)
    others = _count_threads_of_user() if _shares_process_count(request) else 0
    work, private, rules = _confine(request, supervisor)
    os.write(report_w, b"reads_all 1\n" * request.get("reads_all", False) + b"private\n" * private)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    _signal.set_wakeup_fd(wake_w)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    program = os.fork()
    if program == 0:
        _in_child(lambda: _program(request, work, rules, output_w, others), report_w)
    os.close(output_w)
    status = _await_end(program, wake_r, alive_r)
    if private:
        _kill(-1)
    _tell(report_w, "ended\n")
    status = _reap_all(program, status, private=private)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    _tell(report_w, f"exit {status} {usage.ru_utime + usage.ru_stime:.6f}\n")


def _tell(report_w: int, text: str) -> None:
    try:  # noqa: SIM105 (contextlib takes a millisecond to import)
        os.write(report_w, text.encode()[:2000])
    except BrokenPipeError:  # the supervisor was killed
        pass


def _await_end(program: int, wake_r: int, alive_r: int) -> int:
    """Reap until the program ends, or the supervisor does or wants it; the wait status, -1 if it still runs."""
    poller = select.poll()
    poller.register(wake_r, select.POLLIN)
    poller.register(alive_r, 0)
    while True:
        events = dict(poller.poll())
        if wake_r in events:
            os.read(wake_r, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == program:
                return status
            if pid == 0:
                break
        if alive_r in events:
            return -1


def _reap_all(program: int, status: int, *, private: bool) -> int:
    """Wait until no process is left below; the program's wait status, if it ends only now.

    Where kill(-1) would hit others, this kills one by one, as the supervisor does, which may be gone.
    """
    while True:
        if not private:
            for pid in descendants(os.getpid()):
                _kill(pid)
        try:
            pid, ended = os.waitpid(-1, 0 if private else os.WNOHANG)
        except ChildProcessError:
            return status
        status = ended if pid == program else status
        if pid == 0:
            time.sleep(0.001)


def _shares_process_count(request: dict) -> bool:
    return not request["drop_root"] and request["namespaces"] != "user"


def _count_threads_of_user() -> int:
    """Threads of this user outside of this call; RLIMIT_NPROC counts them where the user id is not the call's own."""
    uid, count = os.getuid(), 0
    for name in _listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += int(_read(f"/proc/{name}/stat").rpartition(b")")[2].split()[17])
        except (OSError, ValueError):
            continue
    return count


# The program.


def _program(request: dict, work: str, rules: "list[tuple[str, str]]", output_w: int, others: int) -> None:
    kernel.prctl(1, _signal.SIGKILL)  # PR_SET_PDEATHSIG
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    os.setsid()
    os.dup2(output_w, 1), os.dup2(output_w, 2)
    _set_limits(request, others)
    if request["landlock"] and rules:
        kernel.landlock(rules, request["landlock"])
    if request["landlock"] >= kernel.SCOPE_VERSION:
        kernel.landlock_signals(work)
    if request["seccomp"]:
        guarded = request["landlock"] >= kernel.SCOPE_VERSION or bool(request["namespaces"])
        own_files = request["drop_root"] or bool(request["namespaces"])
        program = kernel.seccomp_filter(
            pid=0 if guarded else os.getpid(),
            guard_metadata=not own_files,
            guard_truncate=not own_files and request["landlock"] < 3,
        )
        kernel.seccomp(program)
    code, limits = request["code"], request["limits"]
    packages = PACKAGES if request["namespaces"] else request["box"] + PACKAGES
    request.clear()
    os.closerange(3, 1 << 16)  # the last of what belongs to the launcher
    _prepare_interpreter(work, packages)
    status = _execute(code, limits)
    os._exit(_finish() or status)


def _set_limits(request: dict, others: int) -> None:
    limits = request["limits"]
    cpu_s = int(limits["cpu_s"] + 0.999)
    # The warden counts too, and the supervisor where it is the same user in the same user namespace.
    processes = limits["processes"] + (others + 512 if others else 1 if request["drop_root"] else 2)
    bounds = {
        "CPU": (cpu_s, cpu_s + 1),
        "AS": limits["memory_bytes"],
        "FSIZE": limits["file_bytes"],
        "NPROC": processes,
        "NOFILE": 256,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "STACK": 8 << 20,
        "RTPRIO": 0,
    }
    for name, bound in bounds.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        highest = resource.getrlimit(kind)[1]
        soft, hard = bound if isinstance(bound, tuple) else (bound, bound)
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(kind, (soft, hard))


def _prepare_interpreter(work: str, packages: str) -> None:
    """Make this forked launcher look like a new interpreter."""
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", LANG="C.UTF-8", HOME=work, OPENBLAS_NUM_THREADS="1")
    sys.path[:] = [*(path for path in sys.path if path), packages, ""]
    sys.path_importer_cache.clear()
    sys.argv[:] = [PROGRAM]
    for name in ("_files", "_kernel", "_launcher"):
        sys.modules.pop(name, None)
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115 (it stays open; input() gives EOFError)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what is printed before a kill is not lost


def _execute(code: str, limits: dict) -> int:
    """Run `code` as __main__, show the value of a last expression, and give the exit status Python would give."""
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    try:
        program, last = _compile(code)
        exec(program, module.__dict__)
        if last is not None:
            sys.displayhook(eval(last, module.__dict__))
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _flush()
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), None)
        if hint := _limit_behind(error, limits):
            print(f"[{hint}]", file=sys.stderr)
        return 1
    return 0


def _compile(code: str) -> tuple:
    """`code` without its last statement, if that is an expression, and that expression or None."""
    tree = compile(code, PROGRAM, "exec", 0x400, dont_inherit=True)  # 0x400: the syntax tree
    body, last = tree.body, None  # type: ignore[attr-defined]
    if body and isinstance(body[-1], _ast.Expr):
        last = compile(_ast.Expression(body.pop().value), PROGRAM, "eval", dont_inherit=True)
    return compile(tree, PROGRAM, "exec", dont_inherit=True), last  # type: ignore[call-overload]


def _limit_behind(error: BaseException, limits: dict) -> str:
    """The limit that an exception comes from, in words; "" if from none."""
    if isinstance(error, MemoryError):
        return f"memory limit: {limits['memory_bytes'] >> 20} MB"
    if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.ENOSPC):
        return f"file limit: {limits['file_bytes'] >> 20} MB"
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        return f"process limit: {limits['processes']} processes and threads"
    return ""


def _finish() -> int:
    """What an interpreter does at its end: wait for threads, call what is registered with atexit, flush."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return _flush()


def _flush() -> int:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return 120
    return 0


# What this machine has.


def probe(missing: "list[str]") -> "tuple[dict, bytes]":
    """Try each mechanism in a process of its own: {name: "yes" or "no: why"}. `missing` ones are not tried."""
    report = {}
    for name, attempt in _PROBES.items():
        report[name] = "no: switched off for a test" if name in missing else _tried(attempt)
    return report, b""


def _tried(attempt) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _in_child(lambda: os.write(writer, f"ok {attempt() or ''}".encode()), writer)
    os.close(writer)
    text = b""
    while part := os.read(reader, 4096):
        text += part
    os.close(reader)
    os.waitpid(pid, 0)
    word, _, rest = text.decode(errors="replace").strip().partition(" ")
    return f"yes {rest}".strip() if word == "ok" else f"no: {rest or 'it killed the process'}"


def _try_root(mode: str) -> None:
    uid, gid = os.getuid(), os.getgid()
    names = ("mount_namespace", "net_namespace", "ipc_namespace", "uts_namespace")
    enter_namespaces(mode, sum(kernel.NAMESPACES[name] for name in names))
    mounts, _ = interpreter_paths()
    devices = [path for path in _DEVICES if os.path.exists(path)]
    kernel.build_root(outermost(mounts), devices, lambda _: None, work=WORK, work_bytes=1 << 20, uid=uid, gid=gid)
    if os.path.exists("/proc") or os.path.exists("/home"):
        raise OSError(errno.EPERM, "the old root is still there")


def _try_landlock() -> int:
    version = kernel.landlock_version()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    parent = os.getppid()
    kernel.landlock([("/dev/null", "use")], version)
    try:
        os.listdir("/")
    except PermissionError:
        pass
    else:
        raise OSError(errno.EPERM, "a forbidden directory could be read")
    if version >= kernel.SCOPE_VERSION and not _is_out_of_reach(parent):
        raise OSError(errno.EPERM, "a process outside could be sent signals")
    return version


def _try_seccomp() -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.seccomp(kernel.seccomp_filter())
    try:
        kernel.call("socket", 2, 1, 0)
    except PermissionError:
        return
    raise OSError(errno.EPERM, "a socket could be made")


def _try_drop_root() -> None:
    if os.getuid() != 0:
        return
    uid = kernel.unused_uid(os.getpid())
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _try_limits() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
    try:
        bytearray(2 << 30)
    except MemoryError:
        return
    raise OSError(errno.EPERM, "more memory than the limit could be had")


def _namespace_probe(mode: str, flag: int):
    return lambda: enter_namespaces(mode, flag)


_PROBES = {
    "user_namespace": _namespace_probe("user", 0),
    **{
        name: _namespace_probe("direct" if os.geteuid() == 0 else "user", flag)
        for name, flag in kernel.NAMESPACES.items()
        if name != "user_namespace"
    },
    "private_root": lambda: _try_root("direct" if os.geteuid() == 0 else "user"),
    "landlock": _try_landlock,
    "seccomp": _try_seccomp,
    "drop_root": _try_drop_root,
    "rlimits": _try_limits,
}
