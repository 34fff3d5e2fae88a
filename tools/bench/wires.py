"""Hosts on one machine, joined by wires of a chosen rate and delay, for `tools.bench fabric`.

`become_host` gives a process a network namespace of its own, with one network interface. `carry` is the wires between
such hosts: a process that takes each packet where it leaves a host and hands it over after its time. As with
`tc netem rate R delay D` on the interface of each host, a host sends one packet after the other at the rate, and each
arrives after the delay; here no kernel module is needed. Namespaces and interfaces have no name outside the
processes, so the kernel removes them when these end, however that is.
"""

import ctypes
import fcntl
import heapq
import itertools
import multiprocessing
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

INTERFACE = "wire"
SUBNET = "10.77.1."  # seen only inside the namespaces
MTU = 65_000  # bytes: few packets, so that carrying them costs little
TUN = Path("/dev/net/tun")
CREATE_INTERFACE, PACKETS_ALONE = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI, of linux/if_tun.h
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h


def why_not() -> str | None:
    """Why no hosts can be made here, with the remedy, or None where they can."""
    if os.geteuid():
        return "network namespaces need root; run it with sudo, or in a container as root"
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if not shutil.which(command):
            return f"the command {command} is missing; install {package}"
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"{TUN}: {error.strerror}; load the kernel module tun, or give the container --device {TUN}"
    if subprocess.run(
        ["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, check=False
    ).returncode:
        return "network namespaces are not allowed here; give the container --cap-add SYS_ADMIN --cap-add NET_ADMIN"
    return None


def end_with_parent() -> None:
    """End this process as soon as the one that started it has gone, killed or not, and leave Ctrl-C to that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_after_parent, daemon=True).start()


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def become_host(number: int, carrier: Connection) -> None:
    """Put this process into a network of its own, as host `number` (from 0), and hand its wire's end to `carrier`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NETWORK):
        code = ctypes.get_errno()
        raise OSError(code, f"no network namespace: {os.strerror(code)}")
    end = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(end, CREATE_INTERFACE, struct.pack("16sH", INTERFACE.encode(), PACKETS_ALONE))
    for command in (
        f"link set {INTERFACE} mtu {MTU} txqueuelen 10000 up",
        f"addr add {SUBNET}{number + 1}/24 dev {INTERFACE}",
        "link set lo up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    reduction.send_handle(carrier, end, None)
    os.close(end)


def receive_ends(hosts: list[Connection]) -> dict[bytes, int]:
    """The wires' ends that `become_host` hands over: {address as in a packet: file descriptor}."""
    return {
        bytes([*map(int, SUBNET.split(".")[:3]), number + 1]): reduction.recv_handle(host)
        for number, host in enumerate(hosts)
    }


def carry(ends: Mapping[bytes, int], rate: float, delay: float) -> NoReturn:
    """Carry packets between the ends until this process is killed; `rate` in bytes/s of each host, `delay` in seconds.

    Packets for nobody are dropped.
    """
    free = dict.fromkeys(ends.values(), 0.0)  # when each host has sent its last packet
    watched = list(free)
    under_way: list[tuple[float, int, int, bytes]] = []  # (arrival, order, to, packet)
    order = itertools.count()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(watched, [], [], wait)[0]:
            packet = os.read(end, MTU)
            receiver = ends.get(packet[16:20])
            if receiver is not None:
                free[end] = max(free[end], time.monotonic()) + len(packet) / rate
                heapq.heappush(under_way, (free[end] + delay, next(order), receiver, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, receiver, packet = heapq.heappop(under_way)
            os.write(receiver, packet)
