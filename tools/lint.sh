#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that can be said about the sources without running them. ./dev lint installs what this needs and configures
# build/lint, whose compile commands clang-tidy reads.
# shellcheck disable=SC2317 # functions are called by name, through section and none
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
failed=0

# section NAME COMMAND...: the command prints what is wrong and fails, or is silent.
section() {
    local name=$1
    shift
    if "$@"; then
        echo "ok      $name"
    else
        echo "FAILED  $name"
        failed=1
    fi
}

# Tracked files and those about to be; a file deleted but not yet committed is left out.
files() { git ls-files -co --exclude-standard -- "$@" | while read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done; }
sources() { files '*.h' '*.hpp' '*.c' '*.cpp' '*.cu' '*.cuh'; }
scripts() { files dev .ci '*.sh'; }
# none COMMAND...: fails and shows the output if there is any.
none() {
    local output
    output=$("$@")
    if [ -n "$output" ]; then echo "$output"; return 1; fi
}

formatting() {
    ruff format -q --check --output-format concise .
    sources | xargs -r clang-format-14 --dry-run 2>&1 | grep -oE '^[^ :]+:[0-9]+:' | cut -d: -f1 | sort | uniq -c |
        awk '{print $2 ": " $1 " places"}'
}
licence() {
    { sources && scripts && files '*.py' '*CMakeLists.txt' '*.cmake'; } | while read -r file; do
        head -n 3 "$file" | grep -q "SPDX-License-Identifier: Apache-2.0" || echo "$file has no licence line"
    done
}
# What the CPU backends say to the host's compiler or core is not meant.
# overlap.hpp is for users' kernels and needs no other header.
assembly() { sources | grep -vE '^src/device/ptx.cuh$|^include/crossdock/overlap.hpp$|^src/(device|runtime)/cpu/' | xargs -r grep -nE '\b(asm|__asm__)\b *(volatile|__volatile__)? *\(' /dev/null; }
conditionals() { files 'src/kernels/*.h' 'src/kernels/*.cuh' 'src/a2sgd/kernels/*.h' | xargs -r grep -nE '^ *# *(if|ifdef|ifndef|elif)\b' /dev/null; }
# A layer includes only what ARCHITECTURE.md's table lists for it.
layers() {
    local folder uses allowed
    sed -nE 's/^\| .(src\/\w+|plugin). \|.*\| ([a-z_, ]*)\|$/\1 \2/p' ARCHITECTURE.md | while read -r folder uses; do
        allowed=${folder#src/}${uses:+|${uses//, /|}}
        files "$folder/*" | xargs -r grep -nE '#include "(a2sgd|api|core|fabric|device_api|kernels|network|plugin|runtime|device)/' /dev/null |
            grep -vE "\"(core/(boundary|environment_value|error|interrupt|log|printable|process)\.h|($allowed)/)"
    done
}
# CUDA where ARCHITECTURE.md says it is.
cuda_elsewhere() {
    files 'src/*' | grep -vE '^src/(a2sgd/)?device/|/cuda/|\.cuh?$' |
        xargs -r grep -nE '#include [<"](cuda|nccl_device)|__CUDACC__|__(device|global)__|\bcuda[A-Z]\w*\(' /dev/null
}
# A kernel that is launched in another way is not loaded when a group is made (src/runtime/cuda/kernel_list.h).
launches() { files 'src/*' | grep -v '^src/runtime/cuda/launch.cuh$' | xargs -r grep -nE '<<<|c(uda|u)LaunchKernel|cudaLaunchCooperative' /dev/null; }
# What build/lint compiles, sources that it joins looked at together: each header once. The static analyzer follows no
# calls, which takes a quarter of the time. src/core includes what the host knows of kernels: arguments and geometry.
compiled() { grep -oE '"file": "[^"]+"' build/lint/compile_commands.json | cut -d '"' -f 4 | sort -u; }
tidy() {
    local shallow=(-Xclang -analyzer-config -Xclang mode=shallow)
    compiled | while read -r file; do
        if [[ $file = */src/@(a2sgd|api|core|device_api|network)/*.cpp ]] ||
            { [[ $file = */Unity/* ]] && grep -qE '/src/(a2sgd|api|core|device_api|network)/' "$file"; }; then
            echo "$file"
        fi
    done | xargs -r -P "$(nproc)" -n 1 clang-tidy -p build/lint --quiet --checks=-bugprone-suspicious-include \
        "${shallow[@]/#/--extra-arg=}" 2>/dev/null
}
python() { ruff check -q --output-format concise .; }
shell() { scripts | xargs -r shellcheck; }
# Since the rule: a subject of at most 72 characters, for kernels and their building blocks a body, no list of conflicts.
# A clone without that history has its last commit looked at.
commit_messages() {
    local since=afcf8f37f3875deac8660ed4266d93a37dde2c07 range=('HEAD^!')
    if git merge-base --is-ancestor "$since" HEAD 2>/dev/null; then range=("$since..HEAD"); fi
    git log --no-merges --format='%h %s' "${range[@]}" |
        awk '{ hash = $1; sub(/^[^ ]+ /, "") } length > 72 { print hash ": " length " characters: " $0 }'
    git log --no-merges --format='%h %s' --grep='^# Conflicts' "${range[@]}" | sed 's/$/: lists conflicts/'
    git log --no-merges --format='%h%x09%b%x00' "${range[@]}" -- src/kernels src/device src/a2sgd |
        awk 'BEGIN { RS = "\0"; FS = "\t" } { sub(/^\n/, "") } $1 != "" && $2 ~ /^[ \n]*$/ { print $1 ": no body" }'
}
# Commits that git blame is to leave out are there; a shallow clone cannot tell.
ignored_commits() {
    [ "$(git rev-parse --is-shallow-repository)" = false ] || return 0
    grep -oE '^[0-9a-f]{40}$' .git-blame-ignore-revs | while read -r commit; do
        git cat-file -e "$commit^{commit}" 2>/dev/null || echo "there is no commit $commit"
    done
}

# For terminals. Tables are exempt.
long_lines() { files '*.md' | LC_ALL=C.UTF-8 xargs -r grep -nE '^[^|].{120,}$' /dev/null | cut -d: -f1,2 | sed 's/$/: longer than 120/'; }
# limit WHAT MOST NUMBER
limit() { [ "$3" -le "$2" ] || echo "$1: $3, allowed: at most $2"; }
sizes() {
    limit "bytes in bench/results" 2000000 "$(files 'bench/results/*' | xargs cat | wc -c)"
    limit "inputs in fuzz/corpus and fuzz/corpus_network" 64 "$(files 'fuzz/corpus*' | wc -l)"
}

# A tag of an action may be moved to other code, a commit cannot.
unpinned_actions() { files '.github/*.yml' | xargs -r grep -nE '\buses: ' /dev/null | grep -vE '@[0-9a-f]{40} # v[0-9.]+$'; }

section "formatting (./dev format mends it)" none formatting
section "a licence line in every file" none licence
section "GPU assembly in src/device/ptx.cuh and crossdock/overlap.hpp only" none assembly
section "no conditional compilation in kernels" none conditionals
section "layers include what ARCHITECTURE.md lists" none layers
section "CUDA in folders cuda, .cu files and src/device only" none cuda_elsewhere
section "kernels are launched through src/runtime/cuda/launch.cuh" none launches
section "lines of documents" none long_lines
section "sizes of results and of the fuzzers' corpora" none sizes
section "ruff" python
section "shellcheck" shell
section "actions of workflows are named by commit and version" none unpinned_actions
section "commit messages" none commit_messages
section "commits in .git-blame-ignore-revs exist" none ignored_commits
section "clang-tidy on src/a2sgd, src/api, src/core, src/device_api, src/network and the host side of src/kernels" tidy
exit $failed
