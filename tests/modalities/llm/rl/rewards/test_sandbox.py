"""Programs that do what they should not: each is ended or held back, and nothing of it is left."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from luthier.modalities.llm.rl.rewards import sandbox
from luthier.modalities.llm.rl.rewards.sandbox import Limits, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the isolation is Linux's")


@pytest.fixture
def isolated() -> None:
    """Where all of it can be had; elsewhere the code reward refuses to run, or says so."""
    if sandbox.missing():
        pytest.skip(f"this machine can't keep programs from {sandbox.missing()}")


def processes(sign: str) -> list[str]:
    """Command lines that hold a sign."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = place.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if sign in line and str(os.getpid()) != place.parent.name:
            found.append(line)
    return found


def test_a_program_reads_and_writes() -> None:
    ended = run("import sys\nprint(sys.stdin.read().upper(), end='')\nsys.exit(3)", "häuser\n")
    assert (ended.how, ended.code, ended.output) == ("exited", 3, "HÄUSER\n")


def test_a_crash_is_told_by_its_signal() -> None:
    ended = run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert (ended.how, ended.code) == ("exited", -11)
    assert run("raise ValueError").code == 1
    assert run("this is no program").code == 1
    assert run("\ud800").code == 1


def test_an_endless_loop_is_ended_in_time() -> None:
    started = time.monotonic()
    ended = run("print('begun', flush=True)\nwhile True: pass", limits=Limits(timeout=1))
    assert (ended.how, ended.code, ended.output) == ("timeout", None, "begun\n")
    assert time.monotonic() - started < 6


def test_signals_are_not_waited_for() -> None:
    source = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(9)"
    assert run(source, limits=Limits(timeout=0.5)).how == "timeout"


def test_memory_is_bounded() -> None:
    ended = run("x = bytearray(1 << 30)\nprint('had it')", limits=Limits(memory=128))
    assert (ended.code, ended.output) == (1, "")
    growing = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    assert run(growing, limits=Limits(memory=128, timeout=20)).code == 1


def test_a_file_is_bounded() -> None:
    source = "with open('x', 'wb') as f:\n  for _ in range(64): f.write(bytes(1 << 20)); f.flush()\nprint('written')"
    ended = run(source, limits=Limits(disk=2))
    assert (ended.code, ended.output) == (1, "")


def test_many_files_are_bounded(isolated: None) -> None:
    source = """
written = 0
try:
    for number in range(100000):
        with open(f"f{number}", "wb") as file:
            written += file.write(bytes(1 << 18))
except OSError as error:
    print(written <= 4 << 20, error.errno)
"""
    assert run(source, limits=Limits(disk=4)).output == "True 28\n"  # ENOSPC
    empty = "try:\n  for n in range(100000): open(f'f{n}', 'w').close()\nexcept OSError as e: print(n < 5000, e.errno)"
    assert run(empty, limits=Limits(disk=4)).output == "True 28\n"


def test_a_fork_bomb_is_held_and_nothing_is_left(isolated: None) -> None:
    source = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass  # sign-of-the-bomb"
    started = time.monotonic()
    assert run(source, limits=Limits(timeout=1, processes=8)).how == "timeout"
    assert time.monotonic() - started < 8
    one = run("import os\ntry: os.fork()\nexcept OSError as e: print(e.errno)")
    assert one.output == "11\n", "EAGAIN"
    threads = "import threading\ntry: threading.Thread(target=print).start()\nexcept RuntimeError: print('none')"
    assert run(threads).output == "none\n"
    some = "import os\nfor n in range(3):\n  if os.fork() == 0: os._exit(0)\nprint('done')"
    assert run(some, limits=Limits(processes=8)).output == "done\n"


def test_a_process_that_leaves_its_session_is_ended_too(isolated: None, tmp_path: Path) -> None:
    source = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)  # left-behind-4711"])
    os._exit(0)
os.wait()
import time
time.sleep(0.3)
print("gone", flush=True)
"""
    ended = run(source, limits=Limits(processes=8, timeout=20))
    assert (ended.how, ended.output) == ("exited", "gone\n")
    deadline = time.monotonic() + 5
    while processes("left-behind-4711") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes("left-behind-4711") == []


def test_there_is_no_network(isolated: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 2)
    print("connected")
except OSError as error:
    print("no", error.errno)
"""
        assert run(source).output == "no 101\n"  # ENETUNREACH: even the loopback is down
        with socket.create_connection(("127.0.0.1", port), 2):
            pass  # it is the sandbox that can't


def test_what_it_writes_is_bounded() -> None:
    started = time.monotonic()
    ended = run("while True: print('x' * 1000)", limits=Limits(output=64, timeout=20))
    assert ended.how == "output"
    assert len(ended.output) == 64 * 1024
    assert time.monotonic() - started < 10
    slowly = "import sys, time\nwhile True: print('x', flush=True)"
    assert run(slowly, limits=Limits(output=1 << 20, timeout=0.5)).how == "timeout", "always something to read"


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1234")
    source = "import os\nprint(sorted(n for n in os.environ if 'THREADS' not in n and n != 'LC_CTYPE'))"
    assert run(source).output == "[]\n"


def test_our_files_are_not_open_in_it(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert run("import os\nprint(sorted(map(int, os.listdir('/proc/self/fd')))[:4])").output == "[0, 1, 2, 3]\n"


def test_files_outside_can_t_be_changed(isolated: None, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("before")
    target.chmod(0o666)
    tmp_path.chmod(0o777)
    source = f"""
import os
for place in ({str(target)!r}, "/tmp/x", "/var/tmp/x", "/dev/shm/x", os.path.expanduser("~root/x"), "/x"):
    try:
        open(place, "w").write("after")
        print("wrote", place)
    except OSError:
        pass
open("mine", "w").write("ok")
print(open("mine").read())
"""
    assert run(source).output == "ok\n"
    assert target.read_text() == "before"


def test_homes_and_other_processes_are_not_seen(isolated: None, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("private")
    source = f"""
import os
print([n for n in os.listdir("/proc") if n.isdigit()].__len__() < 5)
print(os.path.exists({str(tmp_path / "note")!r}), os.path.exists({str(Path.home() / ".bashrc")!r}))
print(os.getuid() == 0)
try:
    os.kill({os.getpid()}, 0)
    print("reached")
except OSError:
    print("not there")
"""
    assert run(source).output == "True\nFalse False\nFalse\nnot there\n"


def test_nothing_is_left_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("open('x', 'w').write('y')")
    run("while True: pass", limits=Limits(timeout=0.3))
    assert list(tmp_path.iterdir()) == []


def test_packages_can_be_imported() -> None:
    ended = run("import numpy\nprint(numpy.arange(3).sum())", limits=Limits(timeout=60))
    assert ended.output == "3\n"


def test_what_can_t_be_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_LAUNCHER", Path("/nowhere/at/all.py"))
    with pytest.raises(sandbox.SandboxError, match="without a word"):
        run("print(1)")


def runs(python: str, user: int) -> bool:
    """Whether a user may run a Python."""
    try:
        return subprocess.run([python, "-c", "0"], user=user, group=user, extra_groups=[], cwd="/").returncode == 0
    except OSError:
        return False


def test_another_user_than_root_has_the_same_isolation(isolated: None) -> None:
    """In a user namespace, if the system allows them and the user may run a Python."""
    user = 54321
    if os.getuid() != 0:
        pytest.skip("needs root, to be another user")
    python = next((one for one in (sys.executable, "/usr/bin/python3") if runs(one, user)), None)
    if python is None:
        pytest.skip("only root may run Python here")
    source = """
import socket, sys
sys.path.insert(0, sys.argv[1])
import sandbox
print(sandbox.missing())
print(sandbox.run("import os\\ntry: os.fork()\\nexcept OSError as e: print(e.errno)").output.strip())
print(sandbox.run("open('/tmp/of-another-user', 'w').write('x')").how)
print(sandbox.run("import os\\nprint(len(os.listdir('/proc/1/task')))").output.strip())
print(sandbox.run("while True: pass", limits=sandbox.Limits(timeout=0.3)).how)
"""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(sandbox.__file__).parent, Path(folder, "rewards"))
        os.chown(folder, user, user)
        done = subprocess.run(
            [python, "-I", "-c", source, str(Path(folder, "rewards"))],
            capture_output=True,
            text=True,
            timeout=60,
            user=user,
            group=user,
            extra_groups=[],
            cwd=folder,
            env={"TMPDIR": folder},
        )
    assert done.stdout.splitlines()[:2] == ["()", "11"], done.stdout + done.stderr
    assert done.stdout.splitlines()[2:] == ["exited", "1", "timeout"], done.stdout + done.stderr
    assert not Path("/tmp/of-another-user").exists()
