"""The optional C++ kernels; everything else stands in pyproject.toml and setup.cfg.

The extension is a plain shared library opened with ctypes: no Python API, one build for every
Python. It is optional: without a C++ compiler the installation succeeds and torch computes.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "ftd._cpu_kernels",
            sources=sorted(glob("kernels/cpu/*.cpp")),
            depends=sorted(glob("kernels/cpu/*.h")),
            language="c++",
            # no contraction: the order of additions must not depend on where the compiler happens
            # to see a product and a sum together (kernels/cpu/kernels.h)
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-pthread",
                "-fvisibility=hidden",
                "-ffp-contract=off",
            ],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
