"""An unnamed file on a local disk, read and written past the page cache by several threads at once.

Invariant: the kernel frees it when the process ends, however it ends. Reading and writing are direct (O_DIRECT) or
refused: a silent buffered mode would fill the host memory that the disk is there to save.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from shardbook.arithmetic import round_up
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import RecipeError

PAGE, HUGE_PAGE = 4096, 2 * 2**20
COPY_ALIGN = 64  # of a tensor among others in a buffer: any dtype may begin there
PART = 4 * 2**20  # bytes of one transfer
THREADS = 8
MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # file systems by statfs's f_type: statfs(2)
REMOTE = {0x6969: "NFS", 0xFF534D42: "CIFS", 0x0BD00BD0: "Lustre", 0x65735546: "FUSE", 0x47504653: "GPFS"}


def aligned(numel_bytes: int) -> int:
    return round_up(numel_bytes, PAGE)


def page_buffer(size: int, pin: bool = False) -> Tensor:
    """Returns a host buffer of `size` bytes, uint8, that begins at a page. `pin`: it is registered with CUDA until no
    tensor refers to it, so that copies need no further buffer; wait for its copies before you drop a pinned buffer."""
    # private: mmap's default, shared pages, come from shmem and are never huge pages
    pages = mmap.mmap(-1, max(size, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # the kernel may have no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    owner = (ctypes.c_char * len(pages)).from_buffer(pages)
    buffer = torch.frombuffer(owner, dtype=torch.uint8)[:size]
    if pin and size:  # an empty tensor has the address null, which CUDA refuses
        pages.madvise(mmap.MADV_DONTFORK)  # else a write after a fork moves this process to a copy, the device not
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), size, 0))
        # the buffer's finalizer: pages unmapped without it stay pinned, and CUDA refuses to register that address again
        weakref.finalize(owner, cudart.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer


class DirectFile:
    """A file of `size` bytes on the disk of `folder`, reserved at once. Raises RecipeError where it cannot be made."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, aligned(size)
        check_folder(folder)
        try:
            self.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
            os.posix_fallocate(self.fd, 0, max(self.size, PAGE))
            os.pwritev(self.fd, [memoryview(mmap.mmap(-1, PAGE))], 0)
        except OSError as error:
            raise RecipeError(f"offload.path = {str(folder)!r}: {_explain(error, folder, self.size)}") from error
        self.pool = ThreadPoolExecutor(THREADS, "disk")
        self._map = mmap.mmap(self.fd, max(self.size, PAGE))
        # the whole file as memory, uint8: call `flush` after writing there, before `read`
        self.mapped = torch.frombuffer(self._map, dtype=torch.uint8)

    def flush(self) -> None:
        """Writes changes of the mapping to the disk, and frees the memory of its pages."""
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)

    def read(self, into: Tensor, offset: int) -> None:
        """Fills `into`, uint8 from a page's beginning, with the file's bytes from `offset` on. Raises RunFailed."""
        self._transfer(os.preadv, into, offset, "read")

    def write(self, source: Tensor, offset: int) -> None:
        self._transfer(os.pwritev, source, offset, "written")

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], buffer: Tensor, offset: int, done: str
    ) -> None:
        view = memoryview((ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())).cast("B")

        def part(first: int) -> None:
            last = min(first + PART, len(view))
            while first < last:
                try:
                    count = call(self.fd, [view[first:last]], offset + first)
                except OSError as error:
                    raise RunFailed(
                        f"{self.folder}: {errno.errorcode[error.errno or 0]} at {offset + first}"
                    ) from error
                if count <= 0 or count % PAGE:
                    raise RunFailed(f"{self.folder}: {count} of {last - first} bytes {done} at {offset + first}")
                first += count

        parts: list[Future[None]] = [self.pool.submit(part, first) for first in range(0, len(view), PART)]
        for future in parts:
            future.result()


def check_folder(folder: Path) -> None:
    """Raises RecipeError where `folder` is no directory, or its file system is memory or another machine's."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise RecipeError(f"offload.path = {str(folder)!r}: {what}; must be a directory on a local disk")
    kind = file_system(folder)
    if kind in MEMORY:
        raise RecipeError(
            f"offload.path = {str(folder)!r}: lies on {MEMORY[kind]}, which is memory; must be on a disk, or set "
            "offload.optimizer=cpu"
        )
    if kind in REMOTE:
        raise RecipeError(f"offload.path = {str(folder)!r}: lies on {REMOTE[kind]}; must be on a disk of this machine")


def file_system(folder: Path) -> int:
    """Returns f_type of statfs(2), the first number of its structure; 0 where the call fails."""
    box = (ctypes.c_long * 32)()
    libc = ctypes.CDLL(None, use_errno=True)
    return box[0] if libc.statfs(os.fsencode(folder), ctypes.byref(box)) == 0 else 0


def free_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _explain(error: OSError, folder: Path, size: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"{size / 1e9:.1f} GB are needed there and {free_bytes(folder) / 1e9:.1f} are free"
    if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
        return f"its file system has no direct unnamed files ({error.strerror}); must be a local disk (ext4, xfs)"
    return f"{error.strerror}; must be a directory on a local disk that can be written"
