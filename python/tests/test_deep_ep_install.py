# SPDX-License-Identifier: Apache-2.0
"""import deep_ep: the ways in, what they stand in front of, and a program over torch.distributed that knows nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

from crossdock.launcher.as_deep_ep import FOLDER  # noqa: E402

IMPORTS = """
import importlib.metadata, multiprocessing, os, subprocess, sys
before = dict(os.environ)
version = importlib.metadata.version("deep_ep")
import deep_ep
from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap, topk_idx_t
from deep_ep.utils import EventHandle as Second, EventOverlap, check_nvlink_connections
from deep_ep.utils.event import EventHandle as Third
from deep_ep.buffers.legacy import Buffer as Home
from deep_ep.buffers.elastic import ElasticBuffer as ElasticHome
from deep_ep.buffer import Buffer as OldHome
import deep_ep.buffer, deep_ep.utils.math
assert Home is OldHome is Buffer and ElasticHome is ElasticBuffer and EventHandle is Second is Third
assert deep_ep.utils.math.ceil_div(7, 2) == 4 and dict(os.environ) == before
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.refs import combine, dispatch, generate_pre_combine_data, ordered_accumulate
assert version == importlib.metadata.version("deep-ep") == deep_ep.__version__ == "2.1.0"
try:
    from deep_ep import HybridEPBuffer
except ImportError:
    print("as expected", *sys.argv[1:])
if "parent" in sys.argv and __name__ == "__main__":
    subprocess.run([sys.executable, __file__, "child"], check=True)
    sys.argv[1:] = ["spawned"]
    child = multiprocessing.get_context("spawn").Process(target=print, args=("its target is called",))
    child.start()
    child.join()
"""

# Without a word of Crossdock, but for hosts that are played: gloo and tensors of CPUs, on one node and on two.
PROGRAM = """
import os, torch, torch.distributed as dist
import deep_ep
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.full((3, 128), rank + 1.0, dtype=torch.bfloat16)
ids = torch.arange(size).expand(3, size).contiguous()
weights = torch.rand(3, size)

class Comm:  # as mpi4py has it
    Get_rank, Get_size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)

    def allgather(self, own):
        everybody = [None] * size
        dist.all_gather_object(everybody, own)
        return everybody

buffer = deep_ep.Buffer(None, comm=Comm(), explicitly_destroy=True)
assert buffer.group is None and (buffer.rank, buffer.group_size) == (rank, size)
buffer.destroy()
for nodes in 1, size:
    if nodes > 1:
        os.environ["CROSSDOCK_HOST"] = str(rank)
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 20, 0, low_latency_mode=True, explicitly_destroy=True)
    assert buffer.group is dist.group.WORLD and (buffer.rank, buffer.group_size) == (rank, size)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, size)
    assert per_node is None if nodes == 1 else per_node.tolist() == [3] * nodes
    for worst in 0, 4 * size:
        rows, local, weights_received, counts, handle, event = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, num_worst_tokens=worst, async_finish=True)
        event.current_stream_wait()
        sources = [source + 1 for source in range(size) for _ in range(3)]
        assert rows[: 3 * size, 0].tolist() == sources and counts == ([] if worst else [3 * size])
        assert len(handle) == (6 if nodes == 1 else 10)
        if nodes > 1:
            assert handle[-4].tolist() == [3 * (source + 1) for source in range(size)]
            assert torch.equal(handle[0], in_rank)
        sums, returned, _ = buffer.combine(rows, handle, topk_weights=weights_received)
        assert torch.equal(sums, x * size) and torch.equal(returned, weights)
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(x, ids, 4, size, use_fp8=False, return_recv_hook=True)
    hook()
    sums, _, _ = buffer.low_latency_combine(rows, ids, torch.ones(3, size), handle)
    assert torch.equal(sums, x * size)
    buffer.destroy()
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4, hidden=128)
    rows, _, _, handle, _ = elastic.dispatch(x, ids, weights, num_experts=size, do_expand=True)
    assert torch.equal(elastic.combine(rows, handle)[0], x * size)
    assert deep_ep.get_physical_domain_size(dist.group.WORLD) == (nodes, size // nodes)
    assert elastic.get_physical_domain_size() == (nodes, size // nodes)
print(f"rank {rank} is done", flush=True)
dist.destroy_process_group()
"""


def start(*arguments: Any, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def test_the_command_and_the_folder(tmp_path: Path) -> None:
    """In the program, in one that it starts and in a child by spawn: these find the folder on their path."""
    program = tmp_path / "program.py"
    program.write_text(IMPORTS)
    process = start("-m", "crossdock", "run", "--as-deep-ep", program, "parent")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == [
        "as expected child",
        "as expected parent",
        "as expected spawned",
        "its target is called",
    ]
    assert "deep_ep is crossdock.deep_ep, with the interface of DeepEP 2.1.0" in errors


def test_a_command_that_is_no_script() -> None:
    """What it starts finds the module on its path, as an engine's own command does, and the library, too."""
    code = "import ctypes, deep_ep; print(deep_ep.__version__, hasattr(ctypes.CDLL(None), 'crossdockGetLastError'))"
    process = start("-m", "crossdock", "run", "--as-deep-ep", "sh", "-c", f'{sys.executable} -c "{code}"')
    output, errors = process.communicate(timeout=600)
    assert output == "2.1.0 True\n", errors
    assert "use Crossdock" in errors and "; deep_ep is crossdock.deep_ep, with the interface of DeepEP 2.1.0" in errors


def make_other_deep_ep(folder: Path, is_distribution: bool = True) -> Path:
    """A module that ends its program, in a distribution of another name, as engines' containers have one."""
    file = folder / "deep_ep" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("raise SystemExit('the other deep_ep')\n")
    if is_distribution:
        info = folder / "sgl_deep_ep-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-deep-ep\nVersion: 1.2.3\n")
        (info / "RECORD").write_text("deep_ep/__init__.py,,\n")
    return file


def behind(folder: Path) -> str:
    return os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])


# Which file `import deep_ep` would take, in this program and in those that it starts; nothing is imported.
FINDING = """
import importlib.metadata, importlib.util, multiprocessing, subprocess, sys
print(importlib.util.find_spec("deep_ep").origin, flush=True)
if __name__ == "__main__" and "parent" in sys.argv:
    assert importlib.metadata.version("sgl-deep-ep") == "1.2.3"
    subprocess.run([sys.executable, __file__], check=True)
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
"""


def test_it_stands_in_front_of_others(tmp_path: Path) -> None:
    """Of an installed one, whose distribution is named, and of one in a script's own folder, which Python searches
    before PYTHONPATH; however the program is started, and in its children."""
    site, own = tmp_path / "site", tmp_path / "own"
    installed = make_other_deep_ep(site)
    in_folder = make_other_deep_ep(own, is_distribution=False)
    program = own / "program.py"
    program.write_text(FINDING)
    ours = str(FOLDER / "deep_ep" / "__init__.py")
    python = [sys.executable]
    for command, folder, named in [
        ([*python, program, "parent"], tmp_path, f"sgl-deep-ep 1.2.3, {installed}"),
        (["sh", "-c", f"cd {own} && {sys.executable} program.py parent"], tmp_path, f"sgl-deep-ep 1.2.3, {installed}"),
        ([*python, "-u", "-m", "program", "parent"], own, in_folder),
    ]:
        process = start("-m", "crossdock", "run", "--as-deep-ep", *command, cwd=folder, PYTHONPATH=behind(site))
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0 and output.split() == [ours] * 3, (command, output, errors)
        assert errors.endswith(f"the interface of DeepEP 2.1.0, in front of {named}\n"), (command, errors)
    # A script in Crossdock's own process has imported it; children are found as above.
    process = start("-m", "crossdock", "run", "--as-deep-ep", program, "parent", PYTHONPATH=behind(site))
    output, errors = process.communicate(timeout=600)
    home = str(FOLDER.parents[1] / "deep_ep" / "__init__.py")
    assert process.returncode == 0 and output.split() == [home, ours, ours], (output, errors)
    assert errors.endswith(f", in front of {in_folder}\n"), errors


def test_a_program_that_installs_it(tmp_path: Path) -> None:
    """The same for install_as_deep_ep, which sets no environment: a child by spawn gets the path of its parent."""
    site, own = tmp_path / "site", tmp_path / "own"
    installed = make_other_deep_ep(site)
    make_other_deep_ep(own, is_distribution=False)
    program = own / "program.py"
    program.write_text(FINDING.replace("subprocess.run([", "import crossdock; print(crossdock.install_as_deep_ep()) #"))
    # Without the script's folder, the installed one is the next.
    process = start("-P", program, "parent", PYTHONPATH=behind(site))
    output, errors = process.communicate(timeout=600)
    first, message, spawned, *_ = output.splitlines()
    assert process.returncode == 0 and first == str(installed), (output, errors)
    assert message.endswith(f", in front of sgl-deep-ep 1.2.3, {installed}")
    assert spawned == str(FOLDER / "deep_ep" / "__init__.py")


def test_one_that_is_imported_already(tmp_path: Path) -> None:
    """Nothing can take its place; its distribution is named."""
    other = make_other_deep_ep(tmp_path)
    other.write_text("")
    process = start("-c", "import deep_ep, crossdock; crossdock.install_as_deep_ep()", PYTHONPATH=behind(tmp_path))
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1
    assert f"deep_ep is imported already, from sgl-deep-ep 1.2.3, {other}, and " in errors.splitlines()[-1]


def test_the_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    """Debian's Python and tools that measure have one, and only the first on the path would run."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.was_customized = True\nname = __name__\n")
    code = "import sitecustomize, sys; print(sys.was_customized, sitecustomize.name, sitecustomize.__file__)"
    process = start("-m", "crossdock", "run", "--as-deep-ep", sys.executable, "-c", code, PYTHONPATH=behind(tmp_path))
    output, errors = process.communicate(timeout=600)
    assert output == f"True sitecustomize {tmp_path / 'sitecustomize.py'}\n", errors


@pytest.mark.parametrize("option", ["-I", "-E", "-uE"])
def test_a_python_that_ignores_the_path(option: str) -> None:
    """It would find another deep_ep, or none, and nobody would say so."""
    process = start("-m", "crossdock", "run", "--as-deep-ep", sys.executable, "-u", option, "-c", "import deep_ep")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 2 and f"{option} ignores PYTHONPATH" in errors, errors


def test_a_folder_that_is_called_deep_ep(tmp_path: Path) -> None:
    """It is no package, and in nobody's way."""
    (tmp_path / "deep_ep").mkdir()
    script = tmp_path / "script.py"
    script.write_text("import deep_ep; print(deep_ep.__name__)\n")
    for command in ([script], [sys.executable, script]):
        process = start("-m", "crossdock", "run", "--as-deep-ep", *command)
        output, errors = process.communicate(timeout=600)
        assert output == "crossdock.deep_ep\n", errors


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_processes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = ("-m", "crossdock", "run", "--as-deep-ep", program)
    processes = [start(*command, **common, RANK=str(rank)) for rank in range(2)]
    results = [process.communicate(timeout=600) for process in processes]
    if any("cannot open UCX" in errors for _, errors in results):
        pytest.skip("there is no UCX on this machine, and no second node")
    for rank, (output, errors) in enumerate(results):
        assert output == f"rank {rank} is done\n", errors
