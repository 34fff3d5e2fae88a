"""Ask NCCL itself why a run hangs: its RAS service knows which processes are dead and how far each rank has come.

NCCL opens the service, from version 2.24 on, on one port of each node. NCCL's own client,
`ncclras`, uses the same protocol (src/ras/client.cc): commands and answers are lines of text.
"""

import os
import socket
import threading
from contextlib import suppress

ADDRESS = "localhost:28028"  # NCCL's default for NCCL_RAS_ADDR
SECONDS = 1.0  # for the whole answer: the ranks that wait for this message are about to be ended
COMMANDS = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSTATUS\n"
LINES, WIDTH = 30, 120  # of the answer that are shown
BYTES = 2**16  # of the answer that are read


def ask_nccl() -> str:
    """Return NCCL's status of the job in lines of text; empty if no RAS service answers within `SECONDS`."""
    address = os.environ.get("NCCL_RAS_ADDR", ADDRESS)
    host, _, port = address.rpartition(":")
    answer = bytearray()

    def ask() -> None:
        with (
            suppress(OSError, ValueError, OverflowError),  # the latter two: an impossible address
            socket.create_connection((host.strip("[]"), int(port)), SECONDS) as service,
        ):
            service.sendall(COMMANDS)
            while len(answer) < BYTES and (part := service.recv(BYTES)):
                answer.extend(part)

    # in a thread, since SECONDS must also limit the name's resolution and an answer in many parts
    thread = threading.Thread(target=ask, name="ask NCCL's RAS service", daemon=True)
    thread.start()
    thread.join(SECONDS)
    protocol, *lines = bytes(answer).decode(errors="replace").splitlines() or [""]
    # without empty lines, rulers and the acknowledgement of the time limit; another program may use the port
    lines = ["".join(filter(str.isprintable, line))[:WIDTH] for line in lines if line != "OK" and line.strip(" =")]
    if not protocol.startswith("SERVER PROTOCOL") or not lines:
        return ""
    if len(lines) > LINES:
        lines[LINES:] = [f"... {len(lines) - LINES} more lines: run ncclras"]
    elif thread.is_alive():
        lines.append(f"... no more within {SECONDS:g} s")
    return "\n  ".join([f"NCCL's RAS service at {address} reports:", *lines])
