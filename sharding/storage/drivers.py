"""The driver of a URL's protocol, which is a package of its own: found by fsspec, or named.

Imported when the first URL is used, never by `import sidestream`. A driver keeps its connections; a
child that was forked makes its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..untrusted import one_line

_PACKAGES = {"msc": "multi-storage-client"}
"""Of protocols that fsspec does not know until their package is there."""


def driver_of(protocol: str) -> Any:
    """The fsspec file system of `protocol`, which does not remember what was in a folder.

    Raises:
        ValueError: no package that is installed has a driver for it; says which one to install. Or
            the driver needs more than a URL.
    """
    try:
        import fsspec
        from fsspec.registry import known_implementations
    except ImportError as error:
        raise ValueError(
            f"URLs of {protocol}:// need the package fsspec, which is not installed; install "
            f"{_install('fsspec')}"
        ) from error
    try:
        driver = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        known = known_implementations.get(protocol, {}).get("err", str(error))
        raise ValueError(
            f"expected a driver for {protocol}:// URLs, got none: {one_line(Exception(known))}"
        ) from error
    except ValueError as error:
        wanted = _PACKAGES.get(protocol)
        way_out = (
            f"install {_install(wanted)}"
            if wanted
            else "give another URL, or install a package that has an fsspec driver for it"
        )
        raise ValueError(
            f"expected a driver for {protocol}:// URLs, got none: fsspec knows no such protocol; "
            f"{way_out}"
        ) from error
    # Those that are asynchronous have a thread of their own, by which all others may use them.
    try:
        return _shared(driver, os.getpid()) if driver.async_impl else _made(driver)
    except Exception as error:
        raise ValueError(
            f"expected a driver for {protocol}:// URLs that needs nothing else, got "
            f"{type(error).__name__}: {one_line(error)}; give another URL"
        ) from error


@functools.cache
def _shared(driver: Any, process: int) -> Any:
    return _made(driver, skip_instance_cache=True)


def _made(driver: Any, **options: Any) -> Any:
    # A listing that was kept would hide what other ranks and machines have written since.
    return driver(use_listings_cache=False, **options)


def forget_drivers() -> None:
    """Have the next URL find new connections, by the environment as it is then."""
    _shared.cache_clear()


def _install(package: str) -> str:
    return f"it with: pip install {package}"


@contextmanager
def telling(url: object) -> Iterator[None]:
    """Have errors of a driver be OSErrors in one sentence that names `url`.

    Raises:
        FileNotFoundError, PermissionError, OSError: what drivers raise, whatever its class is.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_told(url, error)) from error
    except PermissionError as error:
        raise PermissionError(_told(url, error)) from error
    except Exception as error:
        raise OSError(_told(url, error)) from error


def _told(url: object, error: Exception) -> str:
    reason = one_line(error).rstrip(".") or type(error).__name__
    known = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    if known and known not in reason:
        reason = f"{reason} ({known})"
    return f"{url}: {reason}"
