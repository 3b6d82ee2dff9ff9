# SPDX-License-Identifier: Apache-2.0
"""python -m crossdock run: any program finds Crossdock whichever way it looks, and what is in the way is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import crossdock
import stub_libraries
from crossdock.errors import InvalidUsage
from crossdock.launcher import gpu_links, libraries, program, take_over
from crossdock.launcher import plugin as network_plugin

RUN = [sys.executable, "-m", "crossdock", "run"]
EVERY_WAY = ("global", "libnccl_ep.so.0", "libnccl_ep.so", "by path")


def start(*command: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )


def files_of(output: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in output.splitlines())


@pytest.fixture
def asking(tmp_path: Path) -> Path:
    return stub_libraries.compile_c(stub_libraries.ASKING, tmp_path / "asking")


def test_a_c_program_finds_it_in_every_way(asking: Path, tmp_path: Path) -> None:
    """Also in a child of a child, and with a library beside it that it would open by its path."""
    bundled = stub_libraries.foreign_nccl_ep(tmp_path / "bundled")
    own = take_over.own_library()
    done = start(asking, bundled)
    assert files_of(done.stdout)["by path"] == str(bundled)
    for command in ([asking, bundled], ["sh", "-c", f"env {asking} {bundled}"]):
        done = start(*RUN, *command)
        assert done.returncode == 0, done.stderr
        found = files_of(done.stdout)
        assert [os.path.realpath(found[way]) for way in EVERY_WAY] == [os.path.realpath(own)] * 4
        assert done.stderr.startswith("crossdock: nccl_ep.h, nccl.ep and TransformerEngine use Crossdock ")
        assert own in done.stderr and done.stderr.count("\n") == 1


def test_its_exit_code_is_the_program_s(asking: Path) -> None:
    assert start(*RUN, asking, "x", 7).returncode == 7
    assert start(*RUN, "sh", "-c", "exit 9").returncode == 9


def test_a_script_finds_it_in_every_way(tmp_path: Path, asking: Path) -> None:
    """In this process, where the environment comes too late for the loader, and in a child."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import ctypes, os, subprocess, sys
from crossdock.launcher.loaded import file_of
home = os.environ["NCCL_EP_HOME"]
for way, name in ("global", None), ("libnccl_ep.so.0",) * 2, ("libnccl_ep.so",) * 2, \
        ("by path", home + "/lib/libnccl_ep.so"):
    print(f"{{way}}: {{file_of(ctypes.CDLL(name).ncclEpGetVersion)}}", flush=True)
subprocess.run([{str(asking)!r}], check=True)
print(*sys.argv[1:], sep=", ")
""")
    done = start(*RUN, script, "--flag", "-m", "two words")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [*EVERY_WAY, *EVERY_WAY]
    assert {os.path.realpath(line.partition(": ")[2]) for line in lines} == {os.path.realpath(take_over.own_library())}
    assert last == "--flag, -m, two words"


def test_every_argument_reaches_the_program(tmp_path: Path) -> None:
    """Also a "--", which argparse likes to keep for itself."""
    show = ["sh", "-c", 'echo "$@"', "sh"]
    for command, words in ((["--", *show], ["--", "-x"]), (["env", "--", *show], ["--check", "--", "--"])):
        done = start(*RUN, *command, *words)
        assert done.stdout.split() == words, done.stderr
    script = tmp_path / "script.py"
    script.write_text("import sys; print(*sys.argv[1:])")
    assert start(*RUN, script, "--", "-m").stdout == "-- -m\n"


def test_a_script_finds_what_lies_beside_it(tmp_path: Path) -> None:
    """As with python SCRIPT: also after it has gone elsewhere, and not what lies where it was started."""
    (tmp_path / "scripts").mkdir()
    for folder, name in ((tmp_path, "here"), (tmp_path / "scripts", "beside")):
        (folder / f"{name}.py").write_text("")
    (tmp_path / "scripts" / "script.py").write_text("""
import importlib.util, os
os.chdir("/")
import beside
print(os.path.isabs(__file__), importlib.util.find_spec("here") is None)
""")
    code = "import sys; from crossdock.__main__ import run_program; sys.exit(run_program())"
    for command in RUN, [sys.executable, "-c", code]:
        done = subprocess.run(
            [*command, "scripts/script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.stdout == "True True\n", done.stderr


def test_a_name_without_a_slash_is_a_command_on_path(tmp_path: Path) -> None:
    """As in a shell: a file of the current folder does not stand in for it, and runs only if it is named as one."""
    on_path = tmp_path / "bin"
    on_path.mkdir()
    for folder in tmp_path, on_path:
        for name in "tool", "app.py":
            (folder / name).write_text(f"#!/bin/sh\necho {folder.name} {name}\n")
            (folder / name).chmod(0o755)
    here = tmp_path.name
    (tmp_path / "only_here").write_text("print('a script')")
    (tmp_path / "app.py").write_text("print('a script of here')")
    path = f"{on_path}{os.pathsep}{os.environ['PATH']}"

    def out(*words: str) -> str:
        done = start(*RUN, *words, cwd=tmp_path, PATH=path)
        return done.stdout.strip() or done.stderr

    assert out("tool") == "bin tool"
    assert out("--", "tool") == "bin tool"
    assert out("./tool") == f"{here} tool"
    assert out("app.py") == "a script of here"
    assert out("./only_here") == out("--", "only_here") == "a script"
    assert "PROGRAM is only_here, which is no command on PATH (./only_here runs" in out("only_here")


def test_nothing_is_loaded_from_the_current_folder(tmp_path: Path) -> None:
    """Neither where a variable of folders has an empty entry, nor as a package of Python."""
    for folder in tmp_path, tmp_path / "nvidia" / "nccl" / "lib":
        folder.mkdir(parents=True, exist_ok=True)
        stub_libraries.nccl(folder, 99999)
    code = "import os; from crossdock.launcher.libraries import find_nccl; print(find_nccl(os.environ, 23004).file)"
    (tmp_path / "script.py").write_text(code)
    for words in (["-c", code], ["script.py"], ["-m", "script"]):
        done = start(sys.executable, *words, cwd=tmp_path, LD_LIBRARY_PATH=":/nowhere:")
        assert done.returncode == 0 and str(tmp_path) not in done.stdout, (words, done.stdout, done.stderr)


def test_one_rank_speaks_for_all() -> None:
    for rank, lines in (("0", 1), ("1", 0)):
        done = start(*RUN, "true", RANK=rank)
        assert (done.returncode, done.stderr.count("\n")) == (0, lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROGRAM is missing: name a script or a command"),
        (["--as-deep-ep", "--"], "PROGRAM is missing: name a script or a command"),
        ([""], "PROGRAM is , which is no command on PATH"),
        (["no_such_program"], "PROGRAM is no_such_program, which is no command on PATH"),
        (["./no_such_program"], "PROGRAM is ./no_such_program, and there is no such file"),
        (["--", "no_such_program"], "PROGRAM is no_such_program, and there is no such file"),
        (["missing.py"], "PROGRAM is missing.py, and there is no such file"),
        (["-m", "no_such_module"], "PROGRAM is no_such_module, and there is no such module"),
        (["--plugin", "nowhere.so", "true"], "--plugin is nowhere.so, which is no file"),
        (["--plugin", __file__, "true"], "which NCCL cannot use: "),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    done = start(*RUN, *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_programs_that_cannot_be_started(asking: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"\x7fELF, it says")
    text.chmod(0o755)
    done = start(*RUN, text)
    assert done.returncode == 126 and f"crossdock: {text} cannot be started: " in done.stderr
    asking.chmod(0o644)
    text.write_text("#!/bin/sh\ntrue\n")
    text.chmod(0o644)
    for program_file in asking, text:
        done = start(*RUN, program_file)
        assert done.returncode == 2 and f"{program_file} is a program that is not executable: chmod +x" in done.stderr


def test_another_library_in_ld_preload(tmp_path: Path) -> None:
    """The loader would give the module the other one, and its message would be about a symbol."""
    other = stub_libraries.foreign_nccl_ep(tmp_path)
    for python in [sys.executable], [sys.executable, "-u"]:  # as torchrun -m starts it
        done = start(*python, "-m", "crossdock", "run", "true", LD_PRELOAD=str(other))
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"{other} is loaded already and has the name libnccl_ep.so.0, so " in done.stderr
        assert "take it out of LD_PRELOAD" in done.stderr
    for before in "", f"import ctypes; ctypes.CDLL({str(other)!r}); ":
        done = start(sys.executable, "-c", f"{before}import crossdock", LD_PRELOAD="" if before else str(other))
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"ImportError: {other} is loaded already"), done.stderr


def test_a_second_library_of_the_name_in_ld_preload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come behind this package's, into the same process."""
    other = stub_libraries.foreign_nccl_ep(tmp_path)
    own = take_over.own_library()
    monkeypatch.setenv("LD_PRELOAD", f"{own}:{other}")
    with pytest.raises(InvalidUsage, match=f"LD_PRELOAD names {other}, .* which is to be {own}: take it out"):
        program.prepare()


def test_another_library_in_ld_library_path(asking: Path, tmp_path: Path) -> None:
    """As of those who ran on NVIDIA's until now: this package's module finds its own, and so does what it starts."""
    other = stub_libraries.library(stub_libraries.NCCL_EP, tmp_path / "other" / "libnccl_ep.so.0")
    done = start(*RUN, asking, LD_LIBRARY_PATH=str(other.parent))
    assert done.returncode == 0, done.stderr
    own = os.path.realpath(take_over.own_library())
    assert {os.path.realpath(file) for file in files_of(done.stdout).values()} == {own}


def test_a_library_that_is_global_already(tmp_path: Path) -> None:
    other = stub_libraries.library(stub_libraries.NCCL_EP, tmp_path / "libother.so")
    done = start(
        sys.executable,
        "-c",
        f"import ctypes; ctypes.CDLL({str(other)!r}, mode=ctypes.RTLD_GLOBAL); import crossdock; "
        "crossdock.take_over_nccl_ep()",
    )
    last = done.stderr.splitlines()[-1]
    assert f"ncclEpGetVersion of {other} is loaded globally already, and comes before that of " in last
    assert take_over.own_library() in last and "python -m crossdock run" in last


def test_nccl_is_put_first(tmp_path: Path) -> None:
    """The new enough one of two, for this process and a child, whatever torch would bring."""
    old, new = stub_libraries.nccl(tmp_path / "old", 22703), stub_libraries.nccl(tmp_path / "new", 23007)
    asking = "import ctypes; n = ctypes.c_int(); ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(n)); print(n)"
    done = start(
        sys.executable,
        "-c",
        f"""
import subprocess, sys
from crossdock.launcher.program import prepare
program = prepare(needs_nccl=True)
program.enter()
print(program.message())
{asking}
sys.stdout.flush()
subprocess.run([sys.executable, "-c", {asking!r}])
""",
        LD_LIBRARY_PATH=f"{old.parent}:{new.parent}",
    )
    message, *numbers = done.stdout.splitlines()
    assert f"; NCCL is 2.30.7, {new}" in message, done.stderr
    assert numbers == ["c_int(23007)"] * 2


def test_an_old_nccl_that_is_loaded_first(tmp_path: Path) -> None:
    """A second one behind it would help nobody: both are named. One that is new enough is left as it is."""
    old, new = stub_libraries.nccl(tmp_path / "old", 22703), stub_libraries.nccl(tmp_path / "new", 23007)
    newer = stub_libraries.nccl(tmp_path / "newer", 23100)
    code = "import ctypes; ctypes.CDLL({!r}); from crossdock.launcher import program; "
    code += "program.prepare(needs_nccl=True).enter()"
    done = start(sys.executable, "-c", code.format(str(old)), CROSSDOCK_NCCL_LIBRARY=str(new))
    message = f"NCCL 2.27.3 ({old}) is loaded in this process already, and {new} would come second: "
    assert message in done.stderr.splitlines()[-1]
    done = start(sys.executable, "-c", code.format(str(newer)), CROSSDOCK_NCCL_LIBRARY=str(new))
    assert done.returncode == 0, done.stderr


def test_nccl_that_is_too_old_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with what to install; one that was asked for is not passed over in silence."""
    old, new = stub_libraries.nccl(tmp_path / "old", 22703), stub_libraries.nccl(tmp_path / "new", 23007)
    monkeypatch.setattr(sys, "path", [])
    install = "2.30.4 or newer is needed: pip install nvidia-nccl-cu13==2.30.7"

    def found(**environment: str) -> libraries.Library:
        return libraries.find_nccl(environment, 23004)

    both = f"{old.parent}:{new.parent}"
    assert found(LD_LIBRARY_PATH=both).file == str(new)
    assert found(LD_LIBRARY_PATH=both, CROSSDOCK_NCCL_LIBRARY=str(new)).problem == ""
    for asked in {"CROSSDOCK_NCCL_LIBRARY": str(old)}, {"LD_PRELOAD": f"libx.so {old}"}:
        problem = found(LD_LIBRARY_PATH=both, **asked).problem
        assert problem.startswith(f"NCCL 2.27.3 ({old}) is too old, {install}")
        assert "name that in CROSSDOCK_NCCL_LIBRARY" in problem
    missing = found(CROSSDOCK_NCCL_LIBRARY="/nowhere/libnccl.so.2").problem
    assert missing.startswith("/nowhere/libnccl.so.2 cannot be opened as NCCL (")
    assert install in missing and "take this one out of it" in missing
    monkeypatch.chdir(tmp_path)  # what is started may go to another folder
    for relative in {"CROSSDOCK_NCCL_LIBRARY": "new/libnccl.so.2"}, {"LD_LIBRARY_PATH": "old:new"}:
        assert found(**relative).file == str(new)
    monkeypatch.setattr(libraries, "NCCL", "libnccl.so.none")
    assert found().problem == f"no libnccl.so.none found, {install}"
    monkeypatch.setenv("LD_PRELOAD", str(old))
    monkeypatch.setenv("CROSSDOCK_NCCL_LIBRARY", str(new))
    with pytest.raises(InvalidUsage, match=f"LD_PRELOAD names {old}, .* which is to be {new}"):
        program.prepare(needs_nccl=True)


def test_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = stub_libraries.library(stub_libraries.PLUGIN, tmp_path / "libnccl-rma-crossdock.so")
    done = start(*RUN, "--plugin", plugin, "sh", "-c", "echo $NCCL_RMA_PLUGIN")
    assert done.stdout == f"{plugin}\n"
    assert f"NCCL's network plugin is {plugin}" in done.stderr
    other = stub_libraries.library(stub_libraries.NCCL_EP, tmp_path / "libother.so")
    with pytest.raises(InvalidUsage, match="it has neither ncclRmaPlugin_v14 nor ncclRmaPlugin_v13"):
        program.prepare(plugin=str(other))
    monkeypatch.setenv("CROSSDOCK_NCCL_LIBRARY", str(stub_libraries.nccl(tmp_path, 23004)))
    with pytest.raises(InvalidUsage, match=r"--plugin needs NCCL 2\.30\.7 or newer, and .*libnccl\.so\.2 is 2\.30\.4"):
        program.prepare(plugin=str(plugin), needs_nccl=True)


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose GPUs may not reach each other, without an RDMA device, and NCCL 2.30.7. The package's plugin."""
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(network_plugin, "PACKAGE", tmp_path)
    monkeypatch.setattr(network_plugin, "RDMA_DEVICES", tmp_path / "infiniband")
    variables = (network_plugin.VARIABLE, "NCCL_GIN_PLUGIN", "NCCL_GIN_ENABLE", "CUDA_MODULE_LOADING")
    splitting = (*network_plugin.SPLITTING, network_plugin.ALWAYS_SPLITTING)
    for name in (*variables, *splitting, *network_plugin.HOSTS, *sum(network_plugin.RANKS, ())):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("CROSSDOCK_HOST_MEMORY", "0")
    monkeypatch.setenv("CROSSDOCK_NCCL_LIBRARY", str(stub_libraries.nccl(tmp_path, 23007)))
    return stub_libraries.library(stub_libraries.PLUGIN, tmp_path / "lib" / network_plugin.NAME)


def test_the_plugin_that_is_chosen(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program.prepare(needs_nccl=True)
    assert found.variables({}).items() >= {"NCCL_RMA_PLUGIN": str(no_network), "CUDA_MODULE_LOADING": "EAGER"}.items()
    assert found.variables({"CUDA_MODULE_LOADING": "LAZY"})["CUDA_MODULE_LOADING"] == "LAZY"
    why = "since GPUs here may need a network and there is no RDMA device"
    assert f"NCCL's network plugin is {no_network}, {why}, with CUDA_MODULE_LOADING=EAGER" in found.message()
    assert not program.prepare(needs_nccl=False).plugin

    named = program.prepare(plugin=str(no_network), needs_nccl=True)
    assert named.variables({})["CUDA_MODULE_LOADING"] == "EAGER" and why not in named.message()
    monkeypatch.setenv("NCCL_RMA_PLUGIN", str(no_network))  # as the user has it
    assert not program.prepare(needs_nccl=True).plugin
    assert program.prepare(needs_nccl=True).variables(os.environ)["CUDA_MODULE_LOADING"] == "EAGER"
    assert "CUDA_MODULE_LOADING" not in program.prepare(needs_nccl=True).variables({"NCCL_RMA_PLUGIN": "other.so"})

    monkeypatch.delenv("NCCL_RMA_PLUGIN")
    no_network.unlink()
    lacking = program.prepare(needs_nccl=True)
    assert not lacking.plugin
    assert "this package has no plugin: build it with libucx-dev and libssl-dev" in lacking.message()
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.setattr(gpu_links, "all_reach_each_other", lambda: True)
    quiet = program.prepare(needs_nccl=True).message()
    assert "network plugin" not in quiet and "no plugin" not in quiet


def test_when_a_plugin_is_chosen(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = {"NCCL_P2P_DISABLE": "1", "CROSSDOCK_HOST_MEMORY": "0"}
    devices = network_plugin.RDMA_DEVICES
    devices.mkdir()
    (devices / "rdma_cm").touch()
    assert network_plugin.chosen(forbidden, 23007) == str(no_network)
    assert network_plugin.chosen(forbidden, 23004) == ""  # loads no such plugin
    for name, value in (
        ("NCCL_RMA_PLUGIN", "other.so"),
        ("NCCL_RMA_PLUGIN", "none"),
        ("NCCL_GIN_PLUGIN", "other.so"),
        ("NCCL_GIN_ENABLE", "0"),
    ):
        assert network_plugin.chosen(forbidden | {name: value}, 23007) == "", name
    assert network_plugin.chosen(forbidden | {"NCCL_RMA_PLUGIN": "", "NCCL_GIN_PLUGIN": "none"}, 23007)
    network_plugin.offer(23004)
    assert "NCCL_RMA_PLUGIN" not in os.environ
    network_plugin.offer(23007)
    assert os.environ.pop("NCCL_RMA_PLUGIN") == str(no_network)

    def ask(*_: str) -> str:
        raise AssertionError("nvidia-smi is asked, and its answer changes nothing")

    monkeypatch.setattr(gpu_links, "ask", ask)
    gpu_links.all_reach_each_other.cache_clear()
    (devices / "uverbs0").touch()
    assert network_plugin.chosen({}, 23007) == ""
    (devices / "uverbs0").unlink()
    no_network.unlink()
    assert network_plugin.chosen({}, 23007) == ""


def test_what_may_need_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices: dict[str, str | Exception] = {}

    def ask(*arguments: str) -> str:
        assert arguments[:2] == ("topo", "-p2p")
        answer = matrices[arguments[2]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def needs(nvlink: str | Exception, pcie: str | Exception, **environment: str) -> bool:
        matrices.update(n=nvlink, r=pcie)
        gpu_links.all_reach_each_other.cache_clear()
        return network_plugin.may_need_network({"CROSSDOCK_HOST_MEMORY": "0"} | environment)

    monkeypatch.setattr(gpu_links, "ask", ask)
    none, both = " GPU0 X NS\n GPU1 NS X\n", " GPU0 X OK\n GPU1 OK X\n"
    assert needs(none, none)
    assert not needs(both, none) and not needs(none, both)
    assert not needs("", "")  # no GPU
    assert not needs(FileNotFoundError("nvidia-smi"), "")
    assert not needs(subprocess.TimeoutExpired("nvidia-smi", 30), "")
    assert needs(both, both, NCCL_P2P_DISABLE="1")
    assert not needs(both, both, NCCL_P2P_DISABLE="0") and not needs(both, both, NCCL_P2P_DISABLE="")
    assert needs(both, both, NCCL_LSA_TEAM_SIZE="2") and needs(both, both, CROSSDOCK_LSA_TEAM_SIZE="1")
    for shared in ("", "1", "on"):  # the host's memory
        assert not needs(none, none, CROSSDOCK_HOST_MEMORY=shared)
        assert not needs(both, both, CROSSDOCK_HOST_MEMORY=shared, NCCL_P2P_DISABLE="1", NCCL_LSA_TEAM_SIZE="1")
        assert needs(both, both, CROSSDOCK_HOST_MEMORY=shared, CROSSDOCK_LSA_TEAM_SIZE="1")
        assert needs(both, both, CROSSDOCK_HOST_MEMORY=shared, SLURM_JOB_NUM_NODES="2")
    assert needs(both, both, SLURM_JOB_NUM_NODES="2") and not needs(both, both, SLURM_JOB_NUM_NODES="1")
    assert not needs(both, both, SLURM_JOB_NUM_NODES="2", SLURM_STEP_NUM_NODES="1")
    for ranks, here in network_plugin.RANKS:
        assert needs(both, both, **{ranks: "16", here: "8"})
        assert not needs(both, both, **{ranks: "8", here: "8"})


def make_package(folder: Path, name: str, version: str, *files: str) -> None:
    """What pip leaves of a package's metadata, and its files, empty where they are not there."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def test_check_says_what_each_engine_would_use(tmp_path: Path) -> None:
    """From metadata alone: none of them is imported, and nothing is started."""
    bundle = "transformer_engine/wheel_lib"
    files = f"{bundle}/libtransformer_engine.so", f"{bundle}/libnccl_ep.so"
    make_package(tmp_path, "transformer_engine_cu13", "2.20.2", *files)
    (tmp_path / files[0]).write_bytes(b"... NCCL_EP_HOME ...")
    make_package(tmp_path, "flashinfer_python", "0.7.2", "flashinfer/moe_ep/__init__.py")
    make_package(tmp_path, "vllm", "0.33.0", "vllm/__init__.py")
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])
    done = start(*RUN, "--check", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    found = {line.split("  ")[0]: line for line in done.stdout.splitlines()[2:]}
    assert f"{take_over.own_library()}, by NCCL_EP_HOME; without, {tmp_path / files[1]}" in found["TransformerEngine"]
    assert "moe_ep" in found["FlashInfer"]
    assert "with --as-deep-ep deep_ep is crossdock.deep_ep" in found["vLLM"]
    assert found["DeepEP"].split() == ["DeepEP", "no"]
    assert "vllm 0.33.0" in found["vLLM"]
    (tmp_path / files[0]).write_bytes(b"an older one")
    # Its distribution has another name than the module.
    make_package(tmp_path, "sgl_deep_ep", "1.2.3", "deep_ep/__init__.py")
    done = start(*RUN, "--check", PYTHONPATH=path)
    assert "this version does not look for libnccl_ep.so" in done.stdout
    other = f"in front of sgl_deep_ep 1.2.3, {tmp_path / 'deep_ep' / '__init__.py'}"
    found = {line.split("  ")[0]: line for line in done.stdout.splitlines()[2:]}
    for engine in "vLLM", "DeepEP":
        assert found[engine].endswith(f"{other}; without, that one")
    assert found["DeepEP"].split()[1:3] == ["sgl_deep_ep", "1.2.3"]
    for options in ["--as-deep-ep", "--check"], ["--check", "--as-deep-ep"]:
        done = start(*RUN, *options, PYTHONPATH=path)
        assert done.returncode == 0 and done.stdout.splitlines()[0].endswith(other)


def test_the_console_script_is_the_command() -> None:
    code = "import sys; from crossdock.__main__ import run_program; sys.exit(run_program())"
    done = start(sys.executable, "-c", code, "sh", "-c", "exit 4")
    assert done.returncode == 4
    assert f"Crossdock {crossdock.__version__}" in done.stderr


def test_modules_that_cannot_be_run(tmp_path: Path) -> None:
    """One line, as python -m has; an ImportError of the program's own is shown whole."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "program.py").write_text("import there_is_none\n")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])
    for name in ("package", "package.none"):
        done = start(*RUN, "-m", name, PYTHONPATH=path)
        *_, last = done.stderr.splitlines()
        assert done.returncode == 1 and last.startswith(f"crossdock: PROGRAM is {name}: No module named {name}")
        assert "Traceback" not in done.stderr
    done = start(*RUN, "-m", "program", PYTHONPATH=path)
    assert "Traceback" in done.stderr and done.returncode == 1


def test_options_that_there_are_not() -> None:
    done = start(*RUN, "--foo", "true")
    assert done.returncode == 2 and "crossdock run [-h] [--as-deep-ep]" in done.stderr, done.stderr
    done = start(*RUN, "--check", "vllm")
    assert done.returncode == 2 and "PROGRAM is vllm, and --check takes none" in done.stderr


def test_a_library_of_another_name_that_comes_first(tmp_path: Path) -> None:
    other = stub_libraries.library(stub_libraries.NCCL_EP, tmp_path / "libother.so")
    (tmp_path / "script.py").write_text("")
    done = start(*RUN, tmp_path / "script.py", LD_PRELOAD=str(other))
    assert done.returncode == 2 and done.stderr.strip().endswith("take the other one out of LD_PRELOAD"), done.stderr


def test_a_python_without_crossdock(tmp_path: Path) -> None:
    folder = Path(program.__file__).parent / "deep_ep_path"
    done = start(sys.executable, "-S", "-c", "import deep_ep", PYTHONPATH=str(folder))
    assert f"not for {sys.executable}: install it for this Python" in done.stderr.splitlines()[-1], done.stderr
