"""Hosts for tests: network namespaces joined by veth pairs to one bridge, which is in a namespace of its own.

    with Network(3) as network:
        network.hosts[2].cut()          # its link is down, as when somebody pulls the cable
        network.hosts[2].restore()

The machine's own network has no part in it: it only keeps the names of the namespaces. They are removed in any case;
those of a test process that was killed are removed by the next `Network`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pytest

from tests.hosts.wire import Wire

MTU = 9000
_NAMES = Path("/run/netns")
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 1 << 19, 2
_NOBODY = "02:00:00:00:ff:ff"
_TCP = {"tcp_rto_max_ms": 1000, "tcp_retries2": 60, "tcp_syn_retries": 60}
"""What was cut comes back within a second, else as late again as the cut took, and is not given up for a minute."""
_count = 0


def require_namespaces() -> None:
    """Skip where this machine does not permit them; fail where ``REQUIRE_NAMESPACES`` is set, as in CI."""
    name = f"eplb-{os.getpid()}-probe"
    try:
        ip(f"netns add {name}")
        ip(f"netns del {name}")
    except (OSError, AssertionError) as error:
        reason = f"network namespaces need root (CAP_SYS_ADMIN, CAP_NET_ADMIN) and `ip` of iproute2: {error}"
        if os.environ.get("REQUIRE_NAMESPACES"):
            pytest.fail(reason)
        pytest.skip(reason)


class Entry:
    """What the process of a rank does first, to live on a host; picklable.

    Args:
        namespace: Name of its network namespace.
        environment: Variables to set.
    """

    def __init__(self, namespace: str, environment: dict[str, str]) -> None:
        self.namespace = namespace
        self.environment = environment

    def __call__(self) -> None:
        """Enter it, and see its interfaces in ``/sys``, where UCX looks for them."""
        os.environ.update(self.environment)
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NAMES / self.namespace).open("rb") as namespace:
            _checked(libc.setns(namespace.fileno(), _CLONE_NEWNET), "setns")
        _checked(libc.unshare(_CLONE_NEWNS), "unshare")
        _checked(libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "mount --make-rslave /")
        libc.umount2(b"/sys", _MNT_DETACH)
        _checked(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")
        for name, value in _TCP.items():
            with contextlib.suppress(OSError):  # Linux before 6.15 has no tcp_rto_max_ms
                Path("/proc/sys/net/ipv4", name).write_text(str(value))


class Host:
    """One host of a network.

    Args:
        number: From 0.
        prefix: Of the names of all namespaces of this network.
    """

    def __init__(self, number: int, prefix: str) -> None:
        self.number = number
        self.namespace = f"{prefix}-h{number}"
        self.node = f"host-{number}"
        self.wires: list[Wire] = []
        self._switch = f"{prefix}-sw"

    def address(self, plane: int = 0) -> str:
        """Its IPv4 address."""
        return f"10.77.{plane}.{self.number + 1}"

    def entry(self, **environment: str) -> Entry:
        """For a rank that is to live here."""
        return Entry(self.namespace, environment)

    def cut(self, plane: int = 0) -> None:
        """Cut it off in the switch: nothing that it sends arrives, nothing reaches it, and nobody is told."""
        ip(f"link set h{self.number}p{plane} nomaster", namespace=self._switch)

    def restore(self, plane: int = 0) -> None:
        """End :meth:`cut`."""
        ip(f"link set h{self.number}p{plane} master br{plane}", namespace=self._switch)

    def silence(self, other: Host, plane: int = 0) -> None:
        """From now on nothing that this host sends reaches the other; the other way all is well."""
        peer = other.address(plane)
        ip(f"neigh replace {peer} lladdr {_NOBODY} nud permanent dev eth{plane}", namespace=self.namespace)

    def speak(self, other: Host, plane: int = 0) -> None:
        """End :meth:`silence`."""
        ip(f"neigh del {other.address(plane)} dev eth{plane}", namespace=self.namespace)

    def limit(self, megabits: int, plane: int = 0) -> None:
        """What the host sends leaves no faster than this."""
        run(
            f"tc -n {self.namespace} qdisc replace dev eth{plane} root tbf rate {megabits}mbit burst 128k latency 200ms"
        )

    def worsen(self, *, delay: float = 0.0, loss: float = 0.0) -> None:
        """Every frame to and from it is late by ``delay`` seconds, or lost with that probability."""
        for wire in self.wires:
            wire.worsen(delay=delay, loss=loss)


class Network:
    """Hosts on a switch, to be used ``with``.

    Args:
        hosts: How many.
        planes: Interfaces of each host, ``eth0`` and so on, each on a network of its own.
        bad: Whether the cables are such that :meth:`Host.worsen` can make late and lose frames; they are slow.
    """

    def __init__(self, hosts: int, *, planes: int = 1, bad: bool = False) -> None:
        global _count
        _count += 1
        self._prefix = f"eplb-{os.getpid()}-{_count}"
        self._planes = range(planes)
        self._bad = bad
        self.hosts = tuple(Host(number, self._prefix) for number in range(hosts))

    def __enter__(self) -> Network:
        require_namespaces()
        _reap()
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self.hosts:
            for wire in host.wires:
                wire.close()
        _remove(self._prefix + "-")

    def _build(self) -> None:
        switch = f"{self._prefix}-sw"
        ip(*(f"netns add {name}" for name in (switch, *(host.namespace for host in self.hosts))))
        ip(*(f"link add br{plane} type bridge" for plane in self._planes), namespace=switch)
        for host in self.hosts:
            for plane in self._planes:
                port = f"h{host.number}p{plane}"
                if self._bad:
                    host.wires.append(Wire(host.namespace, f"eth{plane}", switch, port))
                else:
                    ip(f"link add {port} type veth peer name eth{plane} netns {host.namespace}", namespace=switch)
                ip(
                    f"link set {port} mtu {MTU} addrgenmode none master br{plane} up",
                    f"link set br{plane} addrgenmode none up",
                    namespace=switch,
                )
                ip(
                    f"link set eth{plane} mtu {MTU} addrgenmode none up",
                    f"address add {host.address(plane)}/24 dev eth{plane}",
                    "link set lo up",
                    namespace=host.namespace,
                )


def ip(*commands: str, namespace: str = "") -> str:
    """Run commands of ``ip``, in a namespace or this one."""
    where = ["-n", namespace] if namespace else []
    return run(["ip", *where, "-batch", "-"], "\n".join(commands))


def run(command: str | Sequence[str], said: str = "") -> str:
    """Run a command; an ``AssertionError`` has what it printed."""
    words = command.split() if isinstance(command, str) else command
    done = subprocess.run(words, input=said, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(words)} {said}: {done.stdout}"
    return done.stdout


def _reap() -> None:
    """Remove what test processes that are dead have left."""
    for entry in _NAMES.glob("eplb-*"):
        found = re.match(r"eplb-(\d+)-", entry.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(found[0])


def _remove(prefix: str) -> None:
    for entry in _NAMES.glob(f"{prefix}*"):
        try:
            run(["ip", "netns", "del", entry.name])
        except AssertionError:
            if entry.exists():  # else another test process has reaped it meanwhile
                raise


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
