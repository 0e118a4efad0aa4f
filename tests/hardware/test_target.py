import subprocess
import sys

import pytest

from napkin.errors import NapkinError
from napkin.hardware import CudaTarget, cuda_target


def test_a_target_is_a_device_or_its_name() -> None:
    assert cuda_target("cpu") is None
    assert cuda_target(CudaTarget((8, 0))) == CudaTarget((8, 0))
    assert isinstance(cuda_target("cuda"), CudaTarget)


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NapkinError, match=r"'banana'.*use 'cpu', 'cuda'.*CudaTarget"):
        cuda_target("banana")


def test_a_target_is_described_without_importing_torch() -> None:
    script = "import sys; from napkin.hardware import cuda_target; cuda_target('cpu'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
