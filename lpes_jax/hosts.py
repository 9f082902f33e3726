"""Several processes as one: a search or an evaluation over the devices of many hosts, by `jax.distributed`.

    python -m lpes_jax.search ... --coordinator-address HOST:PORT --num-processes 2 --process-id 0     # on HOST
    python -m lpes_jax.search ... --coordinator-address HOST:PORT --num-processes 2 --process-id 1     # on the other
    srun python -m lpes_jax.search ... --distributed      # on clusters that JAX knows: SLURM, Open MPI, ...

Every process runs the same program with the same settings, makes the same decisions, and evaluates its part on its devices.
Only process 0 reads and writes the run folder and prints; it sends what it reads to the others, so no shared file system is
needed for the run folder. Each process reads the model and the data itself, and `check_alike` checks that they are the same.

No process blocks on a dead peer. Every process keeps a connection to process 0 (in addition to JAX's own) and reports on it
that it is done or why it failed. If a process fails or is killed, all processes end with the same exit code, and process 0
prints the reason on stderr. TCP keepalive or JAX detects a lost host within half a minute. A waiting process prints a line
every ten seconds (`process.waiting`): each process until all have connected, then process 0 only.

With a single process, all functions here do nothing or act locally.
"""

import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener, wait
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from lpes_jax import process
from lpes_jax.errors import UserError
from lpes_jax.settings.groups import HostSettings, check_hosts

_HEARTBEAT = 40  # seconds without a heartbeat after which JAX declares a process dead
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes
Value = TypeVar("Value")


def start(flags: HostSettings) -> None:
    """Connect to the other processes, if the flags name any. Call it before JAX looks for its devices.

    All processes except the first stop printing, except for errors. If the others do not connect in time, the process exits
    with code 2.

    Raises:
        UserError: The flags are invalid, or the processes have different numbers of devices.
    """
    global _company
    many = check_hosts(flags)
    if not many:
        return
    # JAX's preemption service would handle SIGTERM itself.
    jax.config.update("jax_enable_preemption_service", False)
    # On a timeout JAX would abort() with a stack trace.
    late = threading.Timer(flags.start_timeout, _too_late, [flags])
    late.daemon = True
    late.start()
    address = f" at {flags.coordinator_address}" if flags.coordinator_address else ""
    try:
        with process.waiting(f"the other processes{address} (--start-timeout {flags.start_timeout})"):
            jax.distributed.initialize(
                flags.coordinator_address,
                flags.num_processes,
                flags.process_id,
                cluster_detection_method=None if flags.distributed else "deactivate",
                initialization_timeout=flags.start_timeout + 60,
                heartbeat_timeout_seconds=_HEARTBEAT,
            )
    except (ValueError, RuntimeError) as error:
        if flags.distributed:
            way_out = "give --coordinator-address, --num-processes and --process-id"
            raise UserError(f"--distributed: JAX finds no cluster environment ({error}); {way_out}") from error
        raise UserError(f"--coordinator-address {flags.coordinator_address}: {error}; is the port free?") from error
    with process.waiting("the other processes' devices"):
        process.check_devices()
    if jax.process_count() > 1:
        devices = Counter(device.process_index for device in jax.devices())
        if len(set(devices.values())) > 1 or len(devices) < jax.process_count():
            counts = ", ".join(str(devices[number]) for number in range(jax.process_count()))
            raise UserError(
                f"the processes have different numbers of devices: {counts}; make them equal (CUDA_VISIBLE_DEVICES)"
            )
        host = (flags.coordinator_address or "").rpartition(":")[0]
        _company = _First(host or socket.gethostname()) if is_first() else _Other()
        process.set_farewell(_company.fail)
        if not is_first():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = sys.stdout
    late.cancel()


def is_first() -> bool:
    """Whether this process reads and writes the run folder. Always true with a single process."""
    return jax.process_count() == 1 or jax.process_index() == 0


def from_first(read: Callable[[], Value]) -> Value:
    """Call `read` in the first process; return its result, or raise its UserError, in all processes."""
    if jax.process_count() == 1:
        return read()
    found: tuple[Any, str | None] = None, None
    if is_first():
        try:
            found = read(), None
        except UserError as error:
            found = None, str(error)
    with process.waiting("the other processes"):
        value, error = pickle.loads(_broadcast(pickle.dumps(found)))
    if error is not None:
        raise UserError(error)
    return value


def gather(value: Value) -> list[Value]:
    """The values of all processes, by process number, in all of them. All processes must call it in the same order."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    with process.waiting("the other processes"):
        sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32))[:, 0]
        rows = multihost_utils.process_allgather(np.pad(data, (0, _padded(sizes.max()) - len(data))))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def check_alike(record: dict[str, Any], way_out: str = "start all with the same flags, model, data and program") -> None:
    """Raise UserError in all processes if one has another record than the first. The message names the differing entries."""
    records = gather(record)
    for number, other in enumerate(records):
        if names := [name for name in {**records[0], **other} if records[0].get(name) != other.get(name)]:
            values = ", ".join(f"{name} {other.get(name)!r} (the first: {records[0].get(name)!r})" for name in names[:3])
            raise UserError(f"process {number} has {values}; {way_out}")


def leave(code: int, line: str) -> int:
    """Print on stderr why this process fails and return the exit code. With several processes: end all, never return."""
    if _company is not None:
        _company.fail(code, line)
    print(line, file=sys.stderr)
    return code


def finish() -> None:
    """Wait until all processes are done, then disconnect. From here on the end of a process is not a failure."""
    global _company
    if _company is not None:
        with process.waiting("the other processes to end"):
            _company.finish()
        _company = None
        process.set_farewell()
        jax.distributed.shutdown()


def in_company() -> bool:
    """Whether a failure of this process must end other processes."""
    return _company is not None


def _broadcast(data: bytes) -> bytes:
    size = int(multihost_utils.broadcast_one_to_all(np.array([len(data)], np.int32))[0])
    padded = np.zeros(_padded(size), np.uint8)
    if is_first():
        padded[:size] = np.frombuffer(data, np.uint8)
    return multihost_utils.broadcast_one_to_all(padded)[:size].tobytes()


def _padded(size: int) -> int:
    return 1 << (max(int(size), 1024) - 1).bit_length()  # few distinct shapes, as each one is compiled


def _too_late(flags: HostSettings) -> None:
    flag = f"--coordinator-address {flags.coordinator_address}" if flags.coordinator_address else "--distributed"
    many = f"the {flags.num_processes} processes" if flags.num_processes else "the processes"
    line = f"error: {flag}: {many} did not all connect in {flags.start_timeout} s; start each of them, with one address and an"
    _end(2, f"{line} id of its own, and check that no firewall is between them (--start-timeout waits longer)")


def _end(code: int, line: str = "") -> NoReturn:
    """End this process even if its other threads are waiting for a dead process."""
    if line:
        os.write(2, f"{line}\n".encode())
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def _lost(number: int) -> str:
    return (
        f"error: process {number} is gone (killed, or its host or network is down), so all processes end; "
        "start them again; a search resumes with --resume"
    )


class _First:
    """Process 0's side of the connections."""

    def __init__(self, host: str):
        key = secrets.token_bytes(32)
        with Listener(("", 0), "AF_INET", backlog=jax.process_count(), authkey=key) as listener:
            from_first(lambda: (host, listener.address[1], key))
            self._others: dict[int, Any] = {}  # connections by process
            while len(self._others) < jax.process_count() - 1:
                with suppress(AuthenticationError, OSError, EOFError):  # not a connection from one of our processes
                    connection = listener.accept()
                    self._others[connection.recv()] = _kept_alive(connection)
        self._ending, self._all_done = threading.Lock(), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def fail(self, code: int, line: str) -> NoReturn:
        self._ending.acquire()  # never released: the first reason is the one reported
        for connection in self._others.values():
            with suppress(OSError):
                connection.send(code)
        for connection in self._others.values():  # JAX aborts processes whose coordinator (this process) is gone
            with suppress(OSError, EOFError):
                while connection.poll(5):
                    connection.recv()
        _end(code, line)

    def finish(self) -> None:
        self._all_done.wait()
        for connection in self._others.values():
            with suppress(OSError):
                connection.send(0)

    def _listen(self) -> None:
        names: dict[Any, int] = {connection: number for number, connection in self._others.items()}
        while names:
            connection: Any
            for connection in wait(list(names)):
                number = names[connection]
                try:
                    code, line = connection.recv()
                except (OSError, EOFError):
                    self.fail(1, _lost(number))
                if code:
                    time.sleep(1)  # this process may be about to report the same failure
                    self.fail(code, f"process {number}: {line}")
                del names[connection]
        self._all_done.set()


class _Other:
    """The side of any other process."""

    def __init__(self):
        host, port, key = from_first(lambda: ("", 0, b""))
        try:
            self._first = _kept_alive(Client((host, port), "AF_INET", authkey=key))
        except OSError as error:
            raise UserError(
                f"process 0 cannot be reached at {host}:{port} ({error.strerror}); is there a firewall in between?"
            ) from error
        self._first.send(jax.process_index())
        self._code, self._finished = None, threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def fail(self, code: int, line: str) -> NoReturn:
        self._code = code
        try:
            self._first.send((code, line))
        except OSError:
            _end(code, line)
        time.sleep(30)  # process 0 reports the failure and ends this process
        _end(code, line)

    def finish(self) -> None:
        self._first.send((0, ""))
        self._finished.wait()

    def _listen(self) -> None:
        try:
            code = self._first.recv()
        except (OSError, EOFError):
            _end(self._code or 1, "" if self._code else _lost(0))
        if code:
            _end(code)
        self._finished.set()


_company: _First | _Other | None = None


def _kept_alive(connection: Any) -> Any:
    """The connection with TCP keepalive, which detects a lost peer even when nothing is sent."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # Linux
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
