"""The tests of the low-precision and optimizer kernels run on request: `make test-kernels`.

They compare with ml_dtypes and torchao, which `make test` does not install.
"""

import os

collect_ignore = (
    []
    if os.environ.get("SIDESTREAM_KERNEL_SUITE") == "1"
    else [
        f"test_{name}.py"
        for name in (
            *("aot_mx", "aot_nvfp4", "block_formats", "cast", "cast_kernels", "casts_on_gpu"),
            *("codes", "device_codes", "flat_adamw", "flat_sgd", "fp8_kernels", "fp8_scaling"),
            *("hadamard", "mx", "mx_torchao", "noise", "norm", "nvfp4", "ops_nvfp4"),
            *("optim_aot", "swizzle"),
        )
    ]
)
