"""The list of the images that cannot be read, in the run's folder."""

import os
from contextlib import suppress
from pathlib import Path

from utils.data.build import Loaders, gather_unreadable
from utils.data.image_files import describe_unreadable
from utils.distributed.world import World
from utils.files import open_regular, write_atomically

FILE_NAME = "unreadable.txt"


def report_unreadable(world: World, loaders: Loaders, folder: Path) -> list[str]:
    """Collective: lists in `folder`/unreadable.txt what could not be read so far on any rank, beside what an earlier
    start of the run has found; a line for the log of the main process where something is new."""
    merged = gather_unreadable(world, *loaders.every())
    if not merged or not world.main_only(lambda: _list(merged, folder / FILE_NAME)):
        return []
    return [f"{describe_unreadable(merged)}; replaced in training, left out in validation; all: {folder / FILE_NAME}"]


def _list(unreadable: dict[str, str], path: Path) -> bool:
    """Add lines "path, tab, reason" to a file, in order; whether any is new. Names are written as the bytes they are,
    but for line ends."""
    listed = set[bytes]()
    with suppress(OSError), open_regular(path) as file:
        listed = {*file.read().splitlines()}
    rows = ((os.fsencode(name).replace(b"\n", b"\\n"), reason.encode()) for name, reason in unreadable.items())
    found = {name + b"\t" + reason for name, reason in rows}
    if found <= listed:
        return False
    write_atomically(path, b"".join(line + b"\n" for line in sorted(found | listed)))
    return True
