#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# release.sh PYTHON...
# Makes the files of a release from the last commit, in build/release: the source distribution; built from it, a wheel for
# each PYTHON and an archive for C and C++; the documents of build/docs/site; the version's part of the change log; and
# SHA256SUMS. Each file is used as by somebody who has nothing else. CROSSDOCK_CUDA=ON includes the GPU backend, for
# CROSSDOCK_CUDA_ARCHITECTURES, and needs CROSSDOCK_NCCL_INCLUDE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
release=$root/build/release
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# quietly COMMAND...: its output is shown only if it fails.
quietly() {
    if ! "$@" >"$work/log" 2>&1; then
        cat "$work/log" >&2
        die "$*"
    fi
}
die() { printf 'FAILED: %s\n' "$*" >&2 && exit 1; }
ok() { printf 'ok: %s\n' "${*#"$root/"}"; }

version=$(git show HEAD:CMakeLists.txt | sed -nE 's/^project\(crossdock VERSION ([0-9.]+).*/\1/p')
if tag=$(git describe --tags --exact-match --match 'v*' 2>/dev/null); then
    [ "$tag" = "v$version" ] || die "the tag is $tag, the version in CMakeLists.txt $version"
fi
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "note: what is not committed is left out" >&2
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
name=crossdock-$version
rm -rf "$release"
mkdir -p "$release"
# pack ARCHIVE FOLDER FILE...: the same bytes for the same files.
pack() {
    tar -C "$2" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf - "${@:3}" |
        gzip -n9 >"$release/$1"
}

heading=$(git show HEAD:CHANGELOG.md | grep -E "^## \[${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$") ||
    die "CHANGELOG.md has no section '## [$version] - DATE'"
git show HEAD:CHANGELOG.md | awk -v heading="$heading" '/^## / { inside = $0 == heading; next } inside' >"$release/notes.md"

# What the build needs, for one interpreter.
make_venv() {
    local python=$1 folder=$2
    quietly "$python" -m venv --clear "$folder"
    "$folder/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])' |
        xargs -n 1 >"$work/requires"
    quietly "$folder/bin/pip" install -q build -r "$work/requires"
}

make_venv "$1" "$work/venv"
mkdir "$work/committed"
git archive HEAD | tar -xC "$work/committed"
quietly "$work/venv/bin/python" -m build --sdist --no-isolation -o "$release" "$work/committed"
ok "$release/$name.tar.gz"

# All else is made from it, so that it is known to be complete.
tar -xzC "$work" -f "$release/$name.tar.gz"
source=$work/$name
for python in "$@"; do
    [ "$python" = "$1" ] || make_venv "$python" "$work/venv"
    wheel=$(PATH=$work/venv/bin:$PATH tools/wheel.sh "$work/venv/bin/python" "$source" "$release")
    tools/wheel_test.sh "$python" "$wheel"
    ok "$wheel"
done

archive=$name-linux-$(uname -m)
options=(-G Ninja -DCROSSDOCK_DEVELOPER=OFF -DCMAKE_INSTALL_LIBDIR=lib "-DCROSSDOCK_CUDA=${CROSSDOCK_CUDA:-OFF}")
if command -v ccache >/dev/null; then
    options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fi
for setting in CROSSDOCK_NCCL_INCLUDE CROSSDOCK_CUDA_ARCHITECTURES; do
    [ -z "${!setting:-}" ] || options+=("-D$setting=${!setting}")
done
export CCACHE_BASEDIR=$source
PATH=$work/venv/bin:$PATH
quietly cmake -S "$source" -B "$source/build/archive" "${options[@]}"
quietly cmake --build "$source/build/archive"
quietly cmake --install "$source/build/archive" --strip --prefix "$work/installed/$archive"
cp LICENSE README.md CHANGELOG.md "$work/installed/$archive"
pack "$archive.tar.gz" "$work/installed" "$archive"
mkdir "$work/unpacked"
tar -xzC "$work/unpacked" -f "$release/$archive.tar.gz"
tests/install/run.sh "$work/unpacked/$archive"
ok "$release/$archive.tar.gz"

pack "$name-docs.tar.gz" build/docs --exclude=.doctrees --exclude=.buildinfo --transform "s/^site/$name-docs/" site
ok "$release/$name-docs.tar.gz"
(cd "$release" && sha256sum -- *.whl *.tar.gz >SHA256SUMS)
(cd "$release" && quietly sha256sum --check SHA256SUMS)
ok "$release/SHA256SUMS"
