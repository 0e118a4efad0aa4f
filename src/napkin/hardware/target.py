"""The GPU that a step is counted for: what torch's choice of kernels and buffers depends on."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """A CUDA device, as far as a count depends on it; the defaults are those of an H100 with torch 2.13."""

    capability: tuple[int, int] = (9, 0)
    """Compute capability: (8, 0) for A100, (9, 0) for H100 and H200, (10, 0) for B200, (12, 0) for RTX 5090."""
    cudnn_attention: bool = True
    """True if torch has cuDNN 9.15.1 or newer, whose attention it then prefers on capabilities 9.x and 10.x."""

    multiprocessors: int = 132
    """Number of multiprocessors, which is also the number of partial sums of deterministic attention."""

    rms_norm_in_fp32: bool = True
    """True if autocast widens the inputs of F.rms_norm to fp32, as torch does from version 2.12 on."""

    @property
    def workspace_bytes(self) -> int:
        """The workspace that cuBLAS allocates with torch's allocator, and keeps, for each thread that multiplies.

        32 MiB on Hopper and Blackwell, otherwise :4096:2:16:8 (8,519,680 bytes); cuBLASLt shares it.
        aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
        """
        return 32 * 2**20 if self.capability[0] in (9, 10, 12) else 8_519_680


def as_in_release(target: CudaTarget, release: str | None) -> CudaTarget:
    """The target under another release of torch, such as "2.8"; under the one here if it is None.

    Raises NapkinError for what is not the number of a release.
    """
    if release is None:
        return target
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None:
        raise NapkinError(f"'{release}' is not a release of torch: use two numbers, as in 2.8")
    return dataclasses.replace(target, rms_norm_in_fp32=(int(numbers[1]), int(numbers[2])) >= (2, 12))


Target = Literal["cpu", "cuda"] | CudaTarget


def cuda_target(target: CudaTarget | str) -> CudaTarget | None:
    """The CUDA device of a `Target`: "cuda" is this machine's GPU if it has one, otherwise an H100; "cpu" is None.

    Raises NapkinError for any other name.
    """
    if isinstance(target, CudaTarget):
        return target
    if target == "cpu":
        return None
    if target != "cuda":
        raise NapkinError(f"{target!r} is not a target: use 'cpu', 'cuda' or a CudaTarget")
    import torch

    if not torch.cuda.is_available():
        return CudaTarget()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return CudaTarget((properties.major, properties.minor), multiprocessors=properties.multi_processor_count)
