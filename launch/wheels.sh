#!/bin/sh
# Downloads, as wheels, what Shardbook imports beyond torch, transformers, accelerate, pyarrow, pandas and their own needs,
# for a machine that reaches no package index: 4 MB. On a machine with a network, in the checkout:
#   launch/wheels.sh FOLDER [PYTHON [PACKAGE ...]]     PYTHON: the version there, 3.12; PACKAGE: others, with their needs'
#                                                      names, as peft, bitsandbytes, pyarrow, pandas, pytest-xdist
# There: python3 -m pip install --no-index --no-deps --target site FOLDER/*.whl; export PYTHONPATH=$PWD/src:$PWD/site
set -eu
cd "$(dirname "$0")/.."
folder=${1:?launch/wheels.sh FOLDER [PYTHON [PACKAGE ...]]} python=${2:-3.12}
shift; [ $# -eq 0 ] || shift
pinned() { sed -n "s/^\($1==.*\)/\1/p" constraints.txt; }
fetch() {
  python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version "$python" --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 --dest "$folder" "$@"
}
mkdir -p "$folder"
fetch "$(pinned datasets)" dill==0.4.1 multiprocess==0.70.19 "$(pinned pydantic)" "$(pinned tomli-w)" "$(pinned xxhash)" \
  annotated-types typing-inspection typing-extensions
# pydantic takes one version of its core, which stands in its own wheel
core=$(python3 - "$folder" <<'END'
import pathlib, re, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("pydantic-[0-9]*.whl")
with zipfile.ZipFile(wheel) as opened:
    (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
    print(re.search(r"^Requires-Dist: (pydantic-core==\S+)", opened.read(name).decode(), re.M)[1])
END
)
fetch "$core"
for package; do
  version=$(pinned "$package")
  fetch "${version:-$package}"
done
ls "$folder"
echo "there: python3 -m pip install --no-index --no-deps --target site $folder/*.whl"
