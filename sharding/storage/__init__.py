"""Files by path or by URL: the few verbs that checkpoints and data need.

A location is a `pathlib.Path` or a `Url`; `location_of(text)` tells which, without looking at any
storage. What a file system has and an object store lacks (rename, exclusive creation, fsync) is not
among the verbs: whoever writes makes a new file whole, and says so in another one. By example::

    from sidestream.sharding.storage import location_of, open_file, write_whole

    place = location_of("s3://bucket/run") / "notes.json"
    write_whole(place, b"{}")
    with open_file(place) as file:
        file.read_at(memoryview(bytearray(2)), 0)
"""

from .location import (
    File,
    Location,
    NewFile,
    create_file,
    entries_of,
    is_file,
    is_there,
    location_of,
    make_folder,
    open_file,
    read_first,
    remove_all,
    remove_files,
    write_whole,
)
from .url import Url, is_url

__all__ = [
    "File",
    "Location",
    "NewFile",
    "Url",
    "create_file",
    "entries_of",
    "is_file",
    "is_there",
    "is_url",
    "location_of",
    "make_folder",
    "open_file",
    "read_first",
    "remove_all",
    "remove_files",
    "write_whole",
]
