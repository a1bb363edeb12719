"""Ways out of the sandbox, each tried inside and, where that is cheap and harmless, outside: there it must work."""

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orchestra_envs
import pytest
from orchestra_envs.live.sandbox import Limits, Plan, run_python
from orchestra_envs.live.sandbox.run import run_python_blocking

LIMITS = Limits(wall_s=20, cpu_s=10)


@dataclass(frozen=True)
class Attack:
    """A program that raises when it is refused. `outside`: whether it can be seen to work without a sandbox."""

    body: str
    outside: bool = True
    only_root: bool = False


PRELUDE = """
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def call(x86, arm, *arguments):
    number = x86 if os.uname().machine == "x86_64" else arm
    return checked(libc.syscall(number, *map(ctypes.c_long, arguments)))
"""

ATTACKS = {
    "tcp": Attack('socket.create_connection(("127.0.0.1", F["tcp"]), 2)'),
    "udp": Attack('socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", F["udp"]))'),
    "tcp listener": Attack('socket.create_server(("127.0.0.1", 0))'),
    "unix socket": Attack('socket.socket(socket.AF_UNIX).connect(F["unix"])'),
    "abstract unix socket": Attack('socket.socket(socket.AF_UNIX).connect(F["abstract"])'),
    "datagram pair": Attack("socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"),
    "netlink": Attack("socket.socket(16, socket.SOCK_RAW, 0)"),
    "vsock": Attack("socket.socket(40, socket.SOCK_STREAM)", outside=False),
    "socket by number": Attack("call(41, 198, 2, 1, 0)"),
    "socket by number, datagram": Attack("call(41, 198, 2, 2, 0)"),
    "io_uring": Attack("call(425, 425, 4, ctypes.addressof(ctypes.create_string_buffer(256)))", outside=False),
    "passwd": Attack('open("/etc/passwd").read()'),
    "hostname file": Attack('open("/etc/hostname").read()', outside=os.path.exists("/etc/hostname")),
    "file of the user": Attack('open(F["canary"]).read()'),
    "file of the repository": Attack('open(F["source"]).read()'),
    "home": Attack('os.listdir(F["home"])', outside=False),
    "root directory": Attack('os.listdir("/")'),
    "temporary files of others": Attack('os.listdir(os.path.dirname(os.path.dirname(F["canary"])))'),
    "dots": Attack('open(os.path.relpath(F["canary"])).read()'),
    "directory above": Attack('os.listdir("..")', outside=False),
    "link to a file": Attack('os.symlink(F["canary"], "a"); open("a").read()'),
    "link to a directory": Attack('os.symlink("/etc", "b"); open("b/passwd").read()'),
    "hard link": Attack('os.link(F["canary"], "c"); open("c").read()', outside=False),
    "moving away": Attack('open("d", "w"); os.rename("d", F["canary"] + "-moved")'),
    "moving in": Attack('os.rename(F["canary"], "e")', outside=False),
    "new file beside": Attack('open(F["canary"] + "-new", "w").close()'),
    "new directory beside": Attack('os.mkdir(F["canary"] + "-folder")'),
    "deleting": Attack('os.unlink(F["canary"])', outside=False),
    "appending": Attack('open(F["canary"], "a").close()'),
    "interpreter": Attack("open(os.__file__, 'a').close()", outside=False),
    "interpreter's folder": Attack("open(os.path.dirname(os.__file__) + '/sandbox_was_here.py', 'w')", outside=False),
    "interpreter's cache": Attack("os.unlink(os.__cached__)", outside=False),
    "device": Attack('open("/dev/kmsg").read(1)', outside=False),
    "disk": Attack('os.open("/dev/vda", os.O_RDONLY); os.open("/dev/sda", os.O_RDONLY)', outside=False),
    "shared memory": Attack('open("/dev/shm/sandbox_was_here", "w")', outside=False),
    "sys": Attack('os.listdir("/sys")'),
    "own process files": Attack('open("/proc/self/environ", "rb").read()'),
    "first process": Attack('open("/proc/1/cmdline").read()'),
    "environment of the parent": Attack('open("/proc/%d/environ" % F["parent"], "rb").read()'),
    "files of the parent": Attack('os.listdir("/proc/%d/fd" % F["parent"])'),
    "memory of the parent": Attack('open("/proc/%d/mem" % F["parent"], "rb")', outside=False),
    "environment": Attack('F["secret"] in json.dumps(dict(os.environ)) or 1 / 0'),
    "signal": Attack('os.kill(F["victim"], 10)'),
    "signal to the parent": Attack('os.kill(F["parent"], 0)'),
    "signal to the supervisor": Attack("os.getppid() > 1 and os.kill(os.getppid(), 9) or 1 / 0", outside=False),
    "signal by file owner": Attack(
        "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, F['victim']); fcntl.fcntl(r, 10, 12);"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
        outside=False,
    ),
    "signal by number": Attack('call(129, 138, F["victim"], 0, 0)', outside=False),
    "limits of the parent": Attack(
        'import resource; resource.prlimit(F["victim"], resource.RLIMIT_CPU, (100000, 100000))'
    ),
    "priority of the parent": Attack('os.setpriority(os.PRIO_PROCESS, F["victim"], 19)'),
    "priority of the user": Attack("os.setpriority(os.PRIO_USER, 0, 19)", outside=False),
    "processors of the parent": Attack('os.sched_setaffinity(F["victim"], os.sched_getaffinity(0))'),
    "trace": Attack('checked(libc.ptrace(16, F["victim"], 0, 0))', only_root=True),
    "trace the supervisor": Attack("checked(libc.ptrace(16, os.getppid(), 0, 0))", outside=False),
    "memory by call": Attack(
        'b = ctypes.create_string_buffer(16); call(310, 270, F["victim"], ctypes.addressof(b), 1, 0, 1, 0)',
        outside=False,
    ),
    "handle of a file of the parent": Attack('call(438, 438, os.pidfd_open(F["victim"]), 1, 0)', only_root=True),
    "user namespace": Attack("checked(libc.unshare(0x10000000))", only_root=True),
    "mount namespace": Attack("checked(libc.unshare(0x20000))", only_root=True),
    "namespaces by clone": Attack(
        "pid = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)",
        only_root=True,
    ),
    "clone3": Attack("call(435, 435, 0, 0)", outside=False),
    "a namespace of the parent": Attack('os.open("/proc/%d/ns/net" % F["parent"], os.O_RDONLY)'),
    "mount": Attack(
        'os.mkdir("m"); checked(libc.mount(b"none", b"m", b"tmpfs", 0, 0)); libc.umount2(b"m", 2)', only_root=True),
    "new mount calls": Attack("call(430, 430, ctypes.addressof(ctypes.create_string_buffer(b'tmpfs')), 0)", False),
    "chroot": Attack('os.mkdir("r"); os.chroot("r")', only_root=True),
    "root": Attack("os.setuid(0)", only_root=True),
    "groups": Attack("os.setgroups([0])", only_root=True),
    "capabilities": Attack("checked(libc.prctl(47, 2, 21, 0, 0))", outside=False),
    "device file": Attack("os.mknod('n', 0o20666, os.makedev(1, 3)); open('n').read(1)", only_root=True),
    "bpf": Attack("call(321, 280, 0, 0, 0)", outside=False),
    "perf": Attack("call(298, 241, 0, 0, -1, -1, 0)", outside=False),
    "userfaultfd": Attack("call(323, 282, 1)", outside=False),
    "keyring": Attack("call(250, 219, 0, -3, 0)", outside=False),
    "memory file": Attack("os.memfd_create('x')"),
    "shared memory by key": Attack("call(29, 194, 0, 4096, 0o1600)"),
    "watching a folder": Attack(
        "n = call(294, 26, 0); checked(libc.inotify_add_watch(n, os.path.dirname(F['canary']).encode(), 0xfff))"
    ),
    "file by handle": Attack("call(304, 265, -100, 0, 0)", outside=False),
    "kernel log": Attack("checked(libc.klogctl(10, 0, 0))", outside=False),
    "clock": Attack("import time; time.clock_settime(time.CLOCK_REALTIME, time.time())", outside=False),
    "reboot": Attack("checked(libc.reboot(0))", outside=False),
    "open handles": Attack(
        "found = [n for n in range(3, 1000) if os.system and not os.fstat(n)]", outside=False
    ),
    "writing to open handles": Attack(
        "sent = 0\nfor n in range(3, 300):\n"
        "    try: sent += os.write(n, b'exit 0 0\\n')\n    except OSError: pass\nsent or 1 / 0",
        outside=False,
    ),
    "a newer call": Attack("call(452, 452, -100, 0, 0)", outside=False),
    "a shell": Attack("import subprocess; subprocess.run(['/bin/sh', '-c', 'true'], check=True)"),
    "own machine code": Attack(
        "import shutil; shutil.copyfile(sys.executable, 'x'); os.chmod('x', 0o755); "
        "import subprocess; subprocess.run(['./x', '-c', '1'], check=True)",
        outside=False,
    ),
}  # fmt: skip


def program(attack: Attack, facts: dict) -> str:
    body = textwrap.indent(attack.body, "    ")
    return (
        f"{PRELUDE}\nF = json.loads({json.dumps(facts)!r})\ndef attack():\n{body}\n"
        "try:\n    attack()\nexcept Exception as error:\n    print('refused', type(error).__name__, error)\n"
        "else:\n    print('ESCAPED')\nsys.stdout.flush()\n"
    )


@pytest.fixture(scope="module")
def facts() -> Iterator[dict]:
    """Things outside that a program must not reach."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-test-")))
        folder.chmod(0o755)
        canary = folder / "canary"
        canary.write_text("not for models")
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        addresses = {"unix": str(folder / "listener"), "abstract": f"\0sandbox-test-{os.getpid()}"}
        for address in addresses.values():
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen(100)
        os.chmod(addresses["unix"], 0o777)
        command = "import signal, time\nfor n in (10, 12): signal.signal(n, signal.SIG_IGN)\nprint(flush=True)\n"
        victim = stack.enter_context(
            subprocess.Popen([sys.executable, "-S", "-c", command + "time.sleep(600)"], stdout=subprocess.PIPE)
        )
        assert victim.stdout is not None
        victim.stdout.readline()
        stack.callback(victim.kill)
        yield {
            **addresses,
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "canary": str(canary),
            "source": orchestra_envs.__file__,
            "home": str(Path.home()),
            "parent": os.getpid(),
            "victim": victim.pid,
            "secret": "canary-of-the-environment",
        }
        assert victim.poll() is None, "the victim was killed"


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_is_refused(name: str, walls: Plan, facts: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRA_CANARY", facts["secret"])
    result = run_python_blocking(program(ATTACKS[name], facts), LIMITS, walls)
    text = result.output.decode()
    assert text.startswith("refused"), (text, result)
    assert Path(facts["canary"]).read_text() == "not for models"


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.outside])
def test_the_attack_works_without_a_sandbox(
    name: str, facts: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = ATTACKS[name]
    if attack.only_root and os.geteuid() != 0:
        pytest.skip("only root can do this")
    monkeypatch.setenv("ORCHESTRA_CANARY", facts["secret"])
    command = [sys.executable, "-I", "-S", "-c", program(attack, facts)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "ESCAPED\n", done
    for ending in ("-moved", "-new"):
        Path(facts["canary"] + ending).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        Path(facts["canary"] + "-folder").rmdir()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls of other word sizes exist on x86_64")
@pytest.mark.parametrize("way", ["32 bits", "x32"])
def test_calls_of_another_word_size_kill(way: str, walls: Plan) -> None:
    code = {
        "32 bits": "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()",
        "x32": "libc.syscall(0x40000000 + 39)",
    }[way]
    result = run_python_blocking(f"{PRELUDE}\n{code}\nprint('ESCAPED')", LIMITS, walls)
    assert result.output == b""
    assert result.exit_code in ((-31, -11) if way == "32 bits" else (-31,))


def test_a_signal_to_everybody_reaches_nobody_outside(walls: Plan) -> None:
    command = "import signal, time\nsignal.signal(signal.SIGURG, lambda *_: print('reached', flush=True))\n"
    command += "print('ready', flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-S", "-c", command], stdout=subprocess.PIPE, text=True) as bystander:
        assert bystander.stdout is not None
        assert bystander.stdout.readline() == "ready\n"
        code = "import os, signal\ntry: os.kill(-1, signal.SIGURG)\nexcept OSError: pass\nprint('done')"
        assert run_python_blocking(code, LIMITS, walls).output == b"done\n"
        os.kill(bystander.pid, 0)
        bystander.kill()
        assert bystander.stdout.read() == ""


def test_metadata_of_files_outside_stays(walls: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    with tempfile.TemporaryDirectory(prefix="sandbox-test-") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "canary"
        path.write_text("not for models")
        path.chmod(0o604)
        before = path.stat()
        code = f"""
import os
path = {str(path)!r}
for action in (lambda: os.chmod(path, 0o666), lambda: os.utime(path, (1, 1)), lambda: os.truncate(path, 0),
               lambda: os.chown(path, -1, os.getgid()), lambda: os.setxattr(path, "user.x", b"1"),
               lambda: os.chmod(os.path.dirname(path), 0)):
    try:
        action()
    except OSError:
        pass
print("done")
"""
        assert run_python_blocking(code, LIMITS, walls).output == b"done\n"
        after = path.stat()
        assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, before.st_size)
        assert after.st_ctime == before.st_ctime


def test_files_outside_cannot_even_be_looked_up(monkeypatch: pytest.MonkeyPatch, facts: dict) -> None:
    from tests.envs.live.sandbox.conftest import plan_of

    code = f"import os\nprint(os.path.exists({facts['canary']!r}), os.uname().nodename, os.getpid() < 10)"
    result = run_python_blocking(code, LIMITS, plan_of(monkeypatch, "full"))
    assert result.output == b"False sandbox True\n"


def test_own_files_are_free(walls: Plan) -> None:
    code = """
import os, pathlib, shutil, sqlite3, tempfile
assert os.listdir() == []
os.makedirs("a/b"); pathlib.Path("a/b/c").write_text("x"); os.rename("a/b/c", "c"); os.symlink("c", "d")
shutil.copy("c", "e"); shutil.rmtree("a"); tempfile.NamedTemporaryFile("w").write("y")
sqlite3.connect("f.db").execute("create table t (x)")
assert os.environ["HOME"] == os.getcwd()
print(open("d").read(), sorted(os.listdir()))
"""
    assert run_python_blocking(code, LIMITS, walls).output.decode() == "x ['c', 'd', 'e', 'f.db']\n"


async def _two(first: str, second: str, plan: Plan) -> list[bytes]:
    return [(await run_python(code, LIMITS, plan)).output for code in (first, second)]


def test_calls_share_nothing(walls: Plan) -> None:
    import asyncio

    outputs = asyncio.run(
        _two("x = 1; open('f', 'w').write('1'); x", "import os; 'x' in globals(), os.listdir()", walls)
    )
    assert outputs == [b"1\n", b"(False, [])\n"]
