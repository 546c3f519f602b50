"""Errors of the device in what an engine logged."""

from __future__ import annotations

import pytest

from nvsnap_conformance.lifecycle.log_errors import check_log, device_errors_in

# As vLLM 0.31 logged it on an H200: graphs over a custom all-reduce that was closed and opened again.
ILLEGAL = """\
(Worker_TP0 pid=9021) ERROR 11-30 14:10:09 [multiproc_executor.py:995] torch.AcceleratorError: CUDA error: \
an illegal memory access was encountered
(Worker_TP0 pid=9021) ERROR 11-30 14:10:09 [multiproc_executor.py:995] Search for \
`cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
"""


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (ILLEGAL, ["cudaErrorIllegalAddress"]),
        (
            ILLEGAL * 3 + "CUDA_ERROR_ILLEGAL_ADDRESS",
            ["cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS"],
        ),
        (
            "RuntimeError: CUDA error: unspecified launch failure.\n",
            ["CUDA error: unspecified launch failure"],
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled cuda error\n",
            ["NCCL error in: NCCLUtils.hpp:268, unhandled cuda error"],
        ),
        (
            "RuntimeError: CUDA driver error: an illegal memory access was encountered",
            ["CUDA driver error: an illegal memory access was encountered"],
        ),
        ("RuntimeError: CUDART error: invalid resource handle", ["CUDART error: invalid resource handle"]),
        (
            "Failed: Cuda error csrc/custom_all_reduce.cuh:455 'invalid argument'",
            ["Cuda error csrc/custom_all_reduce.cuh:455 'invalid argument'"],
        ),
        (
            "Triton Error [CUDA]: an illegal memory access was encountered",
            ["Triton Error [CUDA]: an illegal memory access was encountered"],
        ),
        (
            "host:1:2 [0] NCCL WARN Cuda failure 700 'an illegal memory access'",
            ["Cuda failure 700 'an illegal memory access'"],
        ),
        ("RuntimeError: NCCL Error 1: unhandled cuda error", ["NCCL Error 1: unhandled cuda error"]),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", ["CUDA out of memory"]),
        ("cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED when calling", ["CUBLAS_STATUS_EXECUTION_FAILED"]),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library", ["ncclInvalidUsage"]),
        ("cudaEventQuery: cudaErrorNotReady; cudaErrorPeerAccessAlreadyEnabled, cudaErrorString", []),
        ("host:1:2 [0] NCCL INFO NVLS: cuMulticastCreate CUDA_ERROR_NOT_SUPPORTED, going on without", []),
        ("INFO 11-30 TORCH_NCCL_ASYNC_ERROR_HANDLING=1 handle NCCL error: SkipCleanUp", []),
        ("ncclRemoteError: A call failed possibly due to a network error", ["ncclRemoteError"]),
        ("INFO capturing CUDA graphs (decode, FULL)\nINFO NCCL version 2.28.9+cuda13.0\n", []),
        ("CUDA_VISIBLE_DEVICES=0,1 CUDA_ERROR_ cudaError ncclError", []),
        ("", []),
    ],
)
def test_what_is_an_error_of_the_device(text: str, errors: list[str]) -> None:
    assert device_errors_in(text) == errors


def test_a_clean_log_has_no_finding_and_an_error_is_named_with_how_many_more() -> None:
    assert check_log("all is well\n") == []
    (found,) = check_log(" ".join(f"cudaError{name}" for name in ("A1", "B1", "C1", "D1", "E1")))
    assert str(found.signature) == "LOG:DEVICE_ERROR"
    assert found.message.endswith("cudaErrorA1; cudaErrorB1; cudaErrorC1 and 2 more")
    assert found.evidence == {"errors": [f"cudaError{letter}1" for letter in "ABCDE"]}
