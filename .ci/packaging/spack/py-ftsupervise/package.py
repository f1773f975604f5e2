"""A package for Spack. Not built yet: Spack was not at hand. What it needs is held equal to pyproject.toml by
tests/unit/test_packaging.py. Spack has no py-cronsim at present: a package of the same form is needed beside it."""

from spack.package import *


class PyFtsupervise(PythonPackage):
    """Keeps long training runs on Slurm clusters alive: queue, guard, watch, alert."""

    pypi = "ftsupervise/ftsupervise-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")  # its checksum comes with the release

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-click@8.1:8", type=("build", "run"))
    depends_on("py-cronsim@2.6:2", type=("build", "run"))
    depends_on("py-psutil@5.9:7", type=("build", "run"))
    depends_on("py-requests@2.31:2", type=("build", "run"))
    depends_on("py-pyyaml@6.0:6", type=("build", "run"))
    depends_on("py-jinja2@3.1:3", type=("build", "run"))
    depends_on("py-slack-sdk@3.27:3", type=("build", "run"))
    depends_on("py-pydantic@2.12:2", type=("build", "run"))
    depends_on("py-rich@13:15", type=("build", "run"))
    depends_on("py-xxhash@3.4:4", type=("build", "run"))
