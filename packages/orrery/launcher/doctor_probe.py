"""Print facts about a node as JSON. `orrery doctor` runs this script on each node.

It needs only Python 3.6 or newer.
"""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

PIECE = 800
POLL_S = 0.02
LOCK_S = 10  # maximum wait for flock
MINE, THEIRS = "mine", "theirs"
IN_IMAGE = """
import importlib.metadata, json, platform
found = importlib.metadata.distributions()
cuda = [d.version for d in found if (d.metadata["Name"] or "").startswith("nvidia-cuda-runtime")]
print(json.dumps({"python": platform.python_version(), "cuda": cuda[0] if cuda else None}))
"""


def main():
    options = json.loads(sys.argv[1])
    rank, size = int(os.environ.get("SLURM_PROCID", 0)), int(os.environ.get("SLURM_NTASKS", 1))
    found = {
        "rank": rank,
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "ended": "in time",
    }

    def out_of_time(*_):
        found["ended"] = "out of time"
        say(found)
        os._exit(0)

    for name in [name for name in os.environ if re.match(options["theirs"], name)]:
        del os.environ[name]
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(options["limit_s"])
    found["address"] = address_of(options["interface"]) if options["interface"] else None
    found["interfaces"] = [name for _, name in socket.if_nameindex()]
    meet(found, options, rank, size)
    found["python"] = ask([options["python"], "-c", "import orrery.launcher; print('imports')"])
    found["visible_gpus"] = [
        one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one
    ]
    found["nvidia"] = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found["nvidia_cuda"] = ask(["nvidia-smi"])
    found["apptainer"] = ask(["apptainer", "--version"])
    found["images"] = {
        name: in_image(path, options["enter_image"]) for name, path in options["images"].items()
    }
    found["user_namespaces"] = read("/proc/sys/user/max_user_namespaces")
    found["fuse"] = os.access("/dev/fuse", os.R_OK | os.W_OK)
    found["infiniband"] = listed("/sys/class/infiniband")
    found["memlock_bytes"] = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found["free_bytes"] = {name: free(path) for name, path in options["folders"].items()}
    found["mounts_missing"] = [path for path in options["mounts"] if not os.path.isdir(path)]
    say(found)


def say(found):
    """Print `found` as JSON in short lines, because srun splits lines above 1024 bytes.

    Line format: `RANK/INDEX/COUNT PIECE`.
    """
    text = json.dumps(found)
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    lines = [
        "{}/{}/{} {}\n".format(found["rank"], place, len(pieces), piece)
        for place, piece in enumerate(pieces)
    ]
    sys.stdout.write("".join(lines))
    sys.stdout.flush()


def ask(argv, within_s=20):
    """Return [exit code, output]. The code is None if the program is missing or times out."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=within_s,
        )
        return [done.returncode, done.stdout.decode(errors="replace").strip()[-3000:]]
    except subprocess.TimeoutExpired:
        return [None, f"no answer within {within_s} s"]
    except OSError as error:
        return [None, error.strerror]


def in_image(path, enter_image):
    if not os.path.exists(path):
        return [None, "not there"]
    return ask(
        enter_image + ["--pwd", "/", path, "/usr/bin/python3", "-I", "-c", IN_IMAGE], within_s=40
    )


def address_of(interface):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            name = struct.pack("256s", interface.encode()[:15])
            row = fcntl.ioctl(asked.fileno(), 0x8915, name)  # SIOCGIFADDR reads the address
        except OSError:
            return None
    return socket.inet_ntoa(row[20:24])


def read(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def listed(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def free(path):
    try:
        return shutil.disk_usage(path).free if os.access(path, os.W_OK) else None
    except OSError:
        return None


def meet(found, options, rank, size):
    """Test network, clocks and shared folder with all other ranks, one per node. Add to `found`:

    - `unseen`: ranks whose file did not appear in the shared folder.
    - `tcp`: rank → connection error, or None.
    - `skew_s`: rank → its clock minus this node's clock.
    - `rename_s`: rank → time until it saw this node's renamed file, or None.
    - `lock`: this rank's answer from `try_lock`, or None.
    """
    folder, wait_s = options["folder"], options["wait_s"]
    found.update(unseen=[], tcp={}, skew_s={}, rename_s={}, lock=None)
    server = socket.socket()
    try:
        server.bind((found["address"] or "127.0.0.1", 0))
        server.listen(size)
        threading.Thread(target=serve, args=(server, folder, wait_s), daemon=True).start()
        publish(folder, f"rank.{rank}", json.dumps([found["address"], server.getsockname()[1]]))
    except OSError as error:
        found["unseen"], found["trouble"] = [one for one in range(size) if one != rank], str(error)
        return
    others = [one for one in range(size) if one != rank]
    limit_s = time.monotonic() + wait_s
    where = {}
    while len(where) < len(others) and time.monotonic() < limit_s:
        for one in others:
            text = None if one in where else read(os.path.join(folder, f"rank.{one}"))
            if text:
                where[one] = json.loads(text)
            # Look before the file exists. NFS then caches its absence, which is the worst case.
            os.path.exists(os.path.join(folder, f"flag.{one}"))
        time.sleep(POLL_S)
    found["unseen"] = [one for one in others if one not in where]
    publish(folder, f"flag.{rank}", "")
    threads = []
    for one in where:
        if where[one][0]:
            given = (found, one, where[one], rank, wait_s)
            threads.append(threading.Thread(target=visit, args=given))
            threads[-1].start()
    for thread in threads:
        thread.join()
    held = take_turns(found, folder, rank, wait_s) if rank == 0 or 0 in where else None
    publish(folder, f"done.{rank}", "")
    limit_s = time.monotonic() + wait_s  # `server` must answer until all ranks are done
    done = [os.path.join(folder, f"done.{one}") for one in where]
    while time.monotonic() < limit_s and not all(map(os.path.exists, done)):
        time.sleep(POLL_S)
    if held is not None:
        os.close(held)


def take_turns(found, folder, rank, wait_s):
    """Test file locks between nodes: rank 0 holds a lock that other ranks try to take.

    Return the lock's file descriptor on rank 0, and None on other ranks.
    """
    if rank == 0:
        held, found["lock"] = try_lock(os.path.join(folder, "lock"))
        publish(folder, "locked", found["lock"])
        return held
    limit_s = time.monotonic() + wait_s + LOCK_S
    while not os.path.exists(os.path.join(folder, "locked")):
        if time.monotonic() > limit_s:
            return None
        time.sleep(POLL_S)
    held, found["lock"] = try_lock(os.path.join(folder, "lock"))
    if held is not None:
        os.close(held)
    return None


def try_lock(path):
    """Try to lock `path`. Return (file descriptor, MINE), (None, THEIRS) or (None, error)."""
    answers = []

    def attempt():
        descriptor = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            answers.append((descriptor, MINE))
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            answers.append((None, THEIRS if isinstance(error, BlockingIOError) else error.strerror))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(LOCK_S)
    return answers[0] if answers else (None, f"no answer within {LOCK_S} s")


def publish(folder, name, text):
    aside = os.path.join(folder, "." + name)
    with open(aside, "w") as file:
        file.write(text)
    os.rename(aside, os.path.join(folder, name))


def visit(found, other, where, rank, wait_s):
    try:
        asked_s = time.time()
        told_s = float(request(where, "time", 5))
        found["skew_s"][other] = told_s - (asked_s + time.time()) / 2
        found["tcp"][other] = None
        found["rename_s"][other] = json.loads(request(where, f"see flag.{rank}", wait_s + 5))
    except (OSError, ValueError) as error:
        found["tcp"].setdefault(other, str(error))


def request(where, text, within_s):
    with socket.create_connection(tuple(where), timeout=within_s) as connection:
        connection.sendall(text.encode() + b"\n")
        return connection.makefile().readline()


def serve(server, folder, wait_s):
    while True:
        connection, _ = server.accept()
        threading.Thread(target=answer, args=(connection, folder, wait_s), daemon=True).start()


def answer(connection, folder, wait_s):
    with connection:
        word, _, name = connection.makefile().readline().strip().partition(" ")
        if word == "time":
            connection.sendall(f"{time.time()}\n".encode())
            return
        begin_s = time.monotonic()
        while not os.path.exists(os.path.join(folder, os.path.basename(name))):
            if time.monotonic() - begin_s > wait_s:
                connection.sendall(b"null\n")
                return
            time.sleep(POLL_S)
        connection.sendall(f"{time.monotonic() - begin_s}\n".encode())


if __name__ == "__main__":
    main()
