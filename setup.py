"""Build script: package layout and the C++ extension; metadata is in pyproject.toml."""

import os
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

# `embedding`, `udfs` and `jobs` lie at the top of the tree but are installed inside the package:
# as top-level imports, names this common would collide with users' own modules. `conf` holds job files.
NESTED = ("embedding", "udfs", "jobs", "conf")

package_dir = {f"deeprec_spark.{name}": name for name in NESTED}
packages = find_packages(include=["deeprec_spark", "deeprec_spark.*"])
for name in NESTED:
    packages.append(f"deeprec_spark.{name}")
    for sub in find_packages(name):
        packages.append(f"deeprec_spark.{name}.{sub}")
        package_dir[f"deeprec_spark.{name}.{sub}"] = f"{name}/{sub.replace('.', '/')}"

sources = sorted(str(path) for path in Path("embedding/core").glob("*.cc"))
headers = sorted(str(path) for kind in ("*.h", "*.inc") for path in Path("embedding/core").glob(kind))

# The baseline is x86-64-v2: a wheel must not die with SIGILL; wider kernels are chosen at run time.
sanitize = os.environ.get("DEEPREC_SANITIZE")
# No contraction: all instruction sets give the same bits.
compile_args = [
    "-O3",
    "-g1",
    "-march=x86-64-v2",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
]
compile_args += ["-Wall", "-Wextra", "-pthread"]
link_args = ["-pthread"]
if sanitize:
    compile_args += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-O1"]
    link_args += [f"-fsanitize={sanitize}"]

ParallelCompile("NPY_NUM_BUILD_JOBS", default=0).install()
setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "deeprec_spark": ["py.typed"],
        "deeprec_spark.embedding": ["*.pyi"],
        "deeprec_spark.conf": ["*.yaml", "*.conf", "*.properties"],
    },
    ext_modules=[
        Pybind11Extension(
            "deeprec_spark.embedding._core",
            sources,
            depends=headers,
            cxx_std=17,
            include_dirs=["embedding/core"],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ],
    cmdclass={"build_ext": build_ext},
)
