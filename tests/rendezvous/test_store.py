"""What can go wrong with a store, and what it says then."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import eplb_async
from eplb_async.errors import HandshakeError
from eplb_async.rendezvous import FileRendezvous, StoreRendezvous, TcpRendezvous, next_incarnation

SECRET = b"0123456789abcdef"


def port_of(rendezvous: TcpRendezvous) -> int:
    return int(rendezvous.url.rpartition(":")[2])


def listeners(port: int) -> set[str]:
    """Local addresses, in hex, on which somebody listens at ``port``."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, local_port = line.split()[1].split(":")
            if int(local_port, 16) == port and line.split()[3] == "0A":
                found.add(address)
    return found


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says anything, as a stopped host does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


# ------------------------------------------------------------------------------------------------ tcp
def test_the_host_listens_on_loopback_only() -> None:
    """The socket is bound to 127.0.0.1, not to every interface as torch would (N-45)."""
    rendezvous = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    try:
        assert listeners(port_of(rendezvous)) == {"0100007F"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port_of(rendezvous)), timeout=5).close()
    finally:
        rendezvous.close()
    assert listeners(port_of(rendezvous)) == set()


def test_port_zero_publishes_the_real_port(caplog: pytest.LogCaptureFixture) -> None:
    """The port that was taken is in ``url`` and in the log (C19)."""
    with caplog.at_level(logging.INFO, "eplb_async"):
        rendezvous = TcpRendezvous.host("localhost", 0, timeout=20, secret=None)
    rendezvous.close()
    assert port_of(rendezvous) > 0
    assert rendezvous.url in caplog.text


def test_a_taken_port_is_named_with_what_to_do() -> None:
    """A second host on one port says which port, and how to get on (C19)."""
    first = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    try:
        with pytest.raises(HandshakeError, match=rf":{port_of(first)}: .*in use.*choose another"):
            TcpRendezvous.host("127.0.0.1", port_of(first), timeout=0.2, secret=None)
    finally:
        first.close()


def test_a_port_is_free_again_after_close() -> None:
    """Closing lets a second run have the same port."""
    first = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    first.close()
    TcpRendezvous.host("127.0.0.1", port_of(first), timeout=20, secret=None).close()


def test_a_client_dials_a_host_that_started_again() -> None:
    """The call that notices fails; once there is a host at that address again, calls reach it."""
    host = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    client = TcpRendezvous.connect("127.0.0.1", port_of(host), timeout=20, secret=None)
    first = next_incarnation(host, "g", 0)
    assert next_incarnation(client, "g", 0) == first + 1
    host.close()
    for what in ("failed", "cannot reach"):
        with pytest.raises(HandshakeError, match=what):
            client.set("k", b"v")
    again = TcpRendezvous.host("127.0.0.1", port_of(host), timeout=20, secret=None)
    assert client.get("k") is None
    client.set("k", b"v")
    assert again.get("k") == b"v"
    assert next_incarnation(again, "g", 0) >= first
    client.close()
    again.close()


def test_what_a_client_has_left_is_in_a_store_that_begins_anew() -> None:
    """Rank 0 may start again while the others open: they do not leave their introductions twice."""
    host = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    client = TcpRendezvous.connect("127.0.0.1", port_of(host), timeout=20, secret=None)
    client.set("g/blob/1", b"old")
    client.set("g/blob/1", b"mine")
    client.set("g/blob/2", b"mine")
    host.close()
    with pytest.raises(HandshakeError, match="failed"):
        client.get("g/blob/0")
    again = TcpRendezvous.host("127.0.0.1", port_of(host), timeout=20, secret=None)
    again.set("g/blob/2", b"of a newer start")
    assert client.get("g/blob/0") is None
    assert again.get("g/blob/1") == b"mine"
    assert again.get("g/blob/2") == b"of a newer start"
    client.close()
    again.close()


def test_a_start_that_is_counted_by_a_store_dialled_again_is_newer() -> None:
    """Also by whoever counted in the one before; and the count that dials is one of the new store, too."""
    host = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    clients = [TcpRendezvous.connect("127.0.0.1", port_of(host), timeout=20, secret=None) for _ in range(2)]
    starts = [[next_incarnation(client, "g", 1)] for client in clients]
    host.close()
    for client in clients:
        with pytest.raises(HandshakeError, match="failed"):
            client.get("k")
    again = TcpRendezvous.host("127.0.0.1", port_of(host), timeout=20, secret=None)
    for start, client in zip(starts, clients, strict=True):
        start.append(next_incarnation(client, "g", 1))
    assert starts[0][0] < starts[1][0] < starts[0][1] < starts[1][1]
    for client in (*clients, again):
        client.close()


def test_a_port_that_is_being_given_back_is_waited_for() -> None:
    """An open that failed gives its store back behind the scenes, and is called again at once."""
    first = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    closing = threading.Timer(0.2, first.close)
    closing.start()
    TcpRendezvous.host("127.0.0.1", port_of(first), timeout=20, secret=None).close()
    closing.join()


def test_a_client_whose_host_hangs_is_not_stuck_with_it(silent_port: int) -> None:
    """A call that runs out leaves its thread behind, and the next one dials."""
    host = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    store = Stuck()
    client = StoreRendezvous(store, timeout=0.2, dial=lambda: host._line._store)  # type: ignore[arg-type, return-value]
    with pytest.raises(HandshakeError, match="has not answered"):
        client.get("k")
    client.set("k", b"v")
    assert host.get("k") == b"v"
    client.close()
    host.close()
    store.free.set()


def test_starts_that_a_later_store_counts_are_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting begins at the time when the store began."""
    starts = []
    for now in (1_800_000_000_000, 1_800_000_000_100):
        monkeypatch.setattr("time.time_ns", lambda now=now: now * 1_000_000)
        host = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
        starts += [next_incarnation(host, "g", 0) for _ in range(2)]
        host.close()
    assert starts == [1_800_000_000_001, 1_800_000_000_002, 1_800_000_000_101, 1_800_000_000_102]


def test_what_is_no_time_is_refused() -> None:
    """Something else under that name is not counted from."""
    store = dist.HashStore()
    store.set("eplb_async/born", "yesterday")
    with pytest.raises(HandshakeError, match=r"born' is b'yesterday', which is no time"):
        TcpRendezvous(store, timeout=20, url="tcp://x", trusted=True)


def test_a_client_waits_for_a_host_that_starts_later() -> None:
    """Ranks start in any order."""
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = int(placeholder.getsockname()[1])
    clients: list[TcpRendezvous] = []
    client = threading.Thread(
        target=lambda: clients.append(TcpRendezvous.connect("127.0.0.1", port, timeout=20, secret=None))
    )
    client.start()
    client.join(0.2)
    assert client.is_alive()
    host = TcpRendezvous.host("127.0.0.1", port, timeout=20, secret=None)
    client.join()
    clients[0].set("k", b"v")
    assert host.get("k") == b"v"
    clients[0].close()
    host.close()


def test_a_host_that_never_starts_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """The wait is bounded, the message names where it looked, and torch fills no log meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = int(placeholder.getsockname()[1])
    with pytest.raises(HandshakeError, match=rf"127\.0\.0\.1:{port} in 0\.3 s: .*refused.*is rank 0"):
        TcpRendezvous.connect("127.0.0.1", port, timeout=0.3, secret=None)
    assert capfd.readouterr().err == ""


def test_a_silent_host_is_bounded(silent_port: int) -> None:
    """torch itself would wait for ever here."""
    with pytest.raises(HandshakeError, match=f"{silent_port}: no answer in .* is it not stopped"):
        TcpRendezvous.connect("127.0.0.1", silent_port, timeout=0.5, secret=None)


def test_a_host_that_goes_away_is_an_error_at_once() -> None:
    """A dead host fails the call, with advice, not only when the time is over."""
    host = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    client = TcpRendezvous.connect("127.0.0.1", port_of(host), timeout=20, secret=None)
    host.close()
    with pytest.raises(HandshakeError, match=r"cannot read 'k'.*is the process that hosts it"):
        client.get("k")
    client.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "8.8.8.8", "::"])
@pytest.mark.parametrize("secret", [None, b"", b"short"])
def test_other_addresses_need_a_secret(host: str, secret: bytes | None) -> None:
    """Whoever is not on loopback must have a secret; the message says how to set one, and never shows it."""
    for make in (TcpRendezvous.host, TcpRendezvous.connect):
        with pytest.raises(HandshakeError, match="EPLB_ASYNC_SECRET=") as caught:
            make(host, 1, timeout=5, secret=secret)
        assert "short" not in str(caught.value)


def test_with_a_secret_every_interface_may_be_used() -> None:
    """A secret opens other addresses; such a rendezvous keeps no key."""
    host = TcpRendezvous.host("0.0.0.0", 0, timeout=20, secret=SECRET)
    assert not host.trusted
    assert listeners(port_of(host)) == {"00000000"}
    host.close()


def test_an_unknown_host_is_named() -> None:
    """A name without an address is an error of its own."""
    with pytest.raises(HandshakeError, match=r"no-such-host\.invalid"):
        TcpRendezvous.host("no-such-host.invalid", 0, timeout=0.2, secret=SECRET)


# ----------------------------------------------------------------------------------------------- file
def test_the_file_is_made_private(tmp_path: Path) -> None:
    """The file is 0600 whatever the umask."""
    before = os.umask(0)
    try:
        FileRendezvous(tmp_path / "store").close()
    finally:
        os.umask(before)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600


def test_the_file_survives_close_and_a_second_run_goes_on(tmp_path: Path) -> None:
    """torch would delete it under a job that has just begun on it."""
    ranks = [FileRendezvous(tmp_path / "store") for _ in range(2)]
    assert ranks[0].add("starts", 1) == 1
    for rank in ranks:
        rank.close()
    again = FileRendezvous(tmp_path / "store")
    assert again.add("starts", 1) == 2
    again.close()


def test_a_relative_path_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is where it was when it was opened, also after a change of directory."""
    monkeypatch.chdir(tmp_path)
    rendezvous = FileRendezvous("store")
    monkeypatch.chdir("/")
    rendezvous.set("k", b"v")
    rendezvous.close()
    assert (tmp_path / "store").stat().st_size > 0


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    """Somebody else may have put it there."""
    (tmp_path / "real").touch(0o600)
    (tmp_path / "store").symlink_to(tmp_path / "real")
    with pytest.raises(HandshakeError, match="symbolic link"):
        FileRendezvous(tmp_path / "store")


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o604, 0o660])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """The message says the mode and the remedy."""
    (tmp_path / "store").touch()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(HandshakeError, match=f"{mode:04o}.*chmod 600"):
        FileRendezvous(tmp_path / "store")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Whoever owns the file could forge peers."""
    (tmp_path / "store").touch(0o600)
    os.chown(tmp_path / "store", 12345, -1)
    with pytest.raises(HandshakeError, match="belongs to user 12345"):
        FileRendezvous(tmp_path / "store")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A directory, a pipe and a missing directory each say what they are."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(HandshakeError, match="not a regular file"):
        FileRendezvous(tmp_path / "pipe")
    with pytest.raises(HandshakeError, match="is a directory"):
        FileRendezvous(tmp_path)
    with pytest.raises(HandshakeError, match=f"no directory {tmp_path}/absent"):
        FileRendezvous(tmp_path / "absent" / "store")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_removed_or_replaced_is_noticed(tmp_path: Path, replaced: bool) -> None:
    """torch would make it again, readable by all; nothing is left behind that was not there."""
    rendezvous = FileRendezvous(tmp_path / "store")
    (tmp_path / "store").unlink()
    if replaced:
        (tmp_path / "store").touch(0o600)
    with pytest.raises(HandshakeError, match="removed or replaced"):
        rendezvous.set("k", b"v")
    rendezvous.close()
    assert (tmp_path / "store").exists() == replaced


def test_a_lock_that_is_never_given_back_is_bounded(tmp_path: Path) -> None:
    """A stopped process may hold the file's lock for ever; it must not hold us, nor a new rank."""
    rendezvous = FileRendezvous(tmp_path / "store", timeout=0.3)
    with open(tmp_path / "store", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(HandshakeError, match=r"was not free for 0\.3 s.*stopped process"):
            rendezvous.get("k")
        with pytest.raises(HandshakeError, match=r"cannot open.* was not free"):
            FileRendezvous(tmp_path / "store", timeout=0.1)
    assert rendezvous.get("k") is None
    rendezvous.close()


@pytest.mark.parametrize("content", [b"hello world\n" * 9, b"\0", b"EPLBRDV2" + b"\0" * 90])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    """A wrong path must not cost somebody their file."""
    (tmp_path / "store").touch(0o600)
    (tmp_path / "store").write_bytes(content)
    with pytest.raises(HandshakeError, match="it holds something else"):
        FileRendezvous(tmp_path / "store")
    assert (tmp_path / "store").read_bytes() == content


def test_a_writer_that_died_anywhere_costs_only_its_own_record(tmp_path: Path) -> None:
    """Cut the last record at every byte: readers do not see it, the next writer overwrites it."""
    path = tmp_path / "store"
    rendezvous = FileRendezvous(path)
    rendezvous.set("first", b"1")
    kept = path.stat().st_size
    rendezvous.set("second", b"22")
    rendezvous.close()
    whole = path.read_bytes()
    for length in (*range(8), *range(kept, len(whole))):
        path.write_bytes(whole[:length])
        rendezvous = FileRendezvous(path)
        assert rendezvous.get("first") == (b"1" if length >= kept else None)
        assert rendezvous.get("second") is None
        rendezvous.set("third", b"3")
        other = FileRendezvous(path)
        assert other.get("third") == b"3"
        rendezvous.close()
        other.close()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """A record in the middle that does not match its checksum is no accident of a dying writer."""
    rendezvous = FileRendezvous(tmp_path / "store")
    rendezvous.set("first", b"1")
    rendezvous.set("second", b"2")
    rendezvous.close()
    data = bytearray((tmp_path / "store").read_bytes())
    data[8 + 12] ^= 1
    (tmp_path / "store").write_bytes(data)
    with pytest.raises(HandshakeError, match="record at byte 8 does not match"):
        FileRendezvous(tmp_path / "store")


# -------------------------------------------------------------------------------------------- general
class Stuck:
    """A Store that never answers."""

    def __init__(self) -> None:
        self.asked, self.free = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        self.free.wait()
        return False


def test_a_store_that_hangs_is_bounded_in_call_and_close() -> None:
    """Every wait has a deadline (I-11)."""
    store = Stuck()
    rendezvous = StoreRendezvous(store, timeout=0.2)  # type: ignore[arg-type]
    started = time.monotonic()
    with pytest.raises(HandshakeError, match="the caller's Stuck has not answered"):
        rendezvous.get("k")
    rendezvous.close()
    assert time.monotonic() - started < 5
    store.free.set()


def test_a_store_that_hangs_holds_up_no_close_longer_than_a_second() -> None:
    """``aclose`` closes it, and has a deadline of its own."""
    store = Stuck()
    rendezvous = StoreRendezvous(store, timeout=60)  # type: ignore[arg-type]
    asking = threading.Thread(target=rendezvous.get, args=["k"])
    asking.start()
    store.asked.wait()
    started = time.monotonic()
    rendezvous.close()
    assert time.monotonic() - started < 3
    store.free.set()
    asking.join()


def test_closing_ends_the_calls_that_wait_for_their_turn() -> None:
    """They say that it is closed, not that they were cancelled."""
    store = Stuck()
    rendezvous = StoreRendezvous(store, timeout=20)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(rendezvous.get, key) for key in ("a", "b")]
        store.asked.wait()
        threading.Timer(0.3, store.free.set).start()
        rendezvous.close()
        for call in calls:
            assert call.exception() is None or "is closed" in str(call.exception())


def test_a_hanging_store_does_not_keep_the_process_from_ending() -> None:
    """The interpreter joins the threads of a ThreadPoolExecutor at exit, but not ours."""
    program = (
        "import threading\n"
        "from eplb_async.threads import DaemonExecutor\n"
        "DaemonExecutor(1, name='x').submit(threading.Event().wait)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_threads_end_with_their_rendezvous(tmp_path: Path) -> None:
    """Closed or only dropped, a rendezvous leaves no thread behind."""
    before = set(threading.enumerate())
    closed, dropped = FileRendezvous(tmp_path / "a"), FileRendezvous(tmp_path / "b")
    closed.get("k")
    dropped.get("k")
    closed.close()
    del dropped
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def test_torch_is_not_imported_before_it_is_needed() -> None:
    """Importing torch takes a second; whoever brings their own Rendezvous does not pay it."""
    program = (
        "import sys, types\n"
        "sys.modules['eplb_async'] = bare = types.ModuleType('eplb_async')\n"
        f"bare.__path__ = {list(eplb_async.__path__)!r}\n"
        "import eplb_async.rendezvous\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
