"""The ways into an interpreter: real starts, real children, a host's own sitecustomize among them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines import vllm_launch
from nvsnap_conformance.engines.protocol import HooksSpec, LaunchConfig, RankReply
from nvsnap_conformance.errors import TargetError, UsageError
from nvsnap_conformance.hooks.injection import INJECT, PLUGIN_NAME, Injection, Way, require_hooks
from nvsnap_conformance.session.pool import require_imported
from nvsnap_conformance.targets.model import load_target

SITE = Injection(Way.SITECUSTOMIZE)

LOOK = """
import json, sys
from vllm.v1.worker.worker_base import WorkerBase
from nvsnap_hooks import arrival
site = sys.modules.get("sitecustomize")
print(json.dumps({
    "rpc": getattr(WorkerBase, "nvsnap_rpc", None) is not None,
    "arrival": arrival.describe(WorkerBase()),
    "site": getattr(site, "__file__", None),
    "finders": [type(f).__name__ for f in sys.meta_path if type(f).__name__ == "_AfterImport"],
    "loader": type(WorkerBase.__module__ and sys.modules[WorkerBase.__module__].__spec__.loader).__name__,
}))
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Give a package that stands for vLLM: a class of workers, and its loading of plugins."""
    worker = tmp_path / "engine" / "vllm" / "v1" / "worker" / "worker_base.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("class WorkerBase:\n    pass\n")
    return tmp_path / "engine"


def start(
    injection: Injection, engine: Path, code: str = LOOK, *, behind: tuple[Path, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    folders = [*injection.first(), *injection.folders(), *behind, engine]
    return subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ) | env | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def host_site(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return folder


@pytest.fixture
def vendor(tmp_path: Path) -> Path:
    """Give a folder with a vendor's hooks."""
    package = tmp_path / "vendor" / "acme"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "late.py").write_text("import an_engine_that_is_not_here\nclass Hooks: ...\n")
    (package / "bad.py").write_text("class Hooks(:\n")
    (package / "star.py").write_text("from acme.late import *\n")
    (package / "lazy.py").write_text("def __getattr__(name): return object\n")
    (package / "renamed.py").write_text("class Theirs: ...\nHooks = Theirs\n")
    (package / "space").mkdir()
    (package / "waits").mkdir()
    (package / "waits" / "__init__.py").write_text("import threading\nthreading.Event().wait()\n")
    (package / "broken").mkdir()
    (package / "broken" / "__init__.py").write_text("raise RuntimeError('no licence')\n")
    return package.parent


@pytest.mark.parametrize("source", ["late", "star", "lazy", "renamed"])
def test_hooks_that_may_be_there_pass(vendor: Path, source: str) -> None:
    require_hooks([sys.executable], dict(os.environ), HooksSpec(f"acme.{source}:Hooks", vendor))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nope.mod:Cls", "No module named 'nope'"),
        ("acme.nope:Cls", "it has no module of this name"),
        ("acme.late:Hook", "late.py has no Hook"),
        ("acme.bad:Hooks", "SyntaxError"),
        ("acme.space:Hooks", "has no Hooks"),
        ("nvsnap_hooks.nope:Hooks", "it has no module of this name"),
        ("nvsnap_hooks.reference:Nope", "has no Nope"),
        ("acme.broken.mod:Hooks", "RuntimeError: no licence"),
    ],
)
def test_hooks_that_cannot_be_imported_are_refused_before_the_engine(
    vendor: Path, source: str, words: str
) -> None:
    with pytest.raises(TargetError, match="cannot be imported") as caught:
        require_hooks([sys.executable], dict(os.environ), HooksSpec(source, vendor))
    assert words in str(caught.value)
    assert "[hooks] source" in caught.value.next_step


def test_a_package_that_waits_when_it_is_imported_is_refused(
    vendor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvsnap_conformance.hooks.injection._PROBE_SECONDS", 1.0)
    with pytest.raises(TargetError, match=r"did not get to the module acme\.waits\.mod within 1 s"):
        require_hooks([sys.executable], dict(os.environ), HooksSpec("acme.waits.mod:Hooks", vendor))


def test_hooks_without_their_path_are_refused_and_the_shipped_need_none(vendor: Path) -> None:
    with pytest.raises(TargetError, match=r"the target names no \[hooks\] path"):
        require_hooks([sys.executable], dict(os.environ), HooksSpec("acme.late:Hooks"))
    require_hooks([sys.executable], dict(os.environ), HooksSpec())
    require_hooks(["/bin/true"], dict(os.environ), HooksSpec("acme.late:Hooks", vendor))


class Answering:
    """An engine whose workers answer every call with one error."""

    def __init__(self, **error: str) -> None:
        self.error = error

    def rpc(self, _method: str, **_facts: Any) -> list[RankReply]:
        return [RankReply(0, "n", "n", error=self.error)]


def test_hooks_that_the_engine_cannot_import_are_no_finding_against_it() -> None:
    deadline = Deadline.after(1.0)
    engine: Any = Answering(
        type="BadRequest", message="acme:H cannot be imported in the engine's interpreter"
    )
    with pytest.raises(TargetError, match="cannot be imported"):
        require_imported(engine, HooksSpec("acme:H"), deadline)
    require_imported(engine, HooksSpec(), deadline)
    there: Any = Answering(type="BadRequest", message="acme:H has no method 'nvsnap_is_there'")
    require_imported(there, HooksSpec("acme:H"), deadline)


def test_sitecustomize_brings_the_loader_and_leaves_no_trace_in_the_import_system(engine: Path) -> None:
    found = told(start(SITE, engine))
    assert found["rpc"]
    assert found["arrival"]["ways"] == ["sitecustomize"]
    assert found["arrival"]["problems"] == []
    assert (found["finders"], found["loader"]) == ([], "SourceFileLoader")


def test_the_shadowed_one_is_run_once_under_its_name(engine: Path, tmp_path: Path) -> None:
    host = host_site(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + '\\n')")
    found = told(start(SITE, engine, behind=(host,)))
    assert (tmp_path / "ran").read_text() == "sitecustomize\n"
    assert found["arrival"]["shadowed"] == str(host / "sitecustomize.py")
    # Whoever imports it by name gets the host's, as without us.
    assert found["site"] == str(host / "sitecustomize.py")


def test_it_runs_before_the_loader_comes_in(engine: Path, tmp_path: Path) -> None:
    host = host_site(tmp_path, "import sys\nassert 'nvsnap_hooks' not in sys.modules\n")
    assert told(start(SITE, engine, behind=(host,)))["arrival"]["shadowed_problem"] is None


def test_one_that_chain_loads_itself_does_not_run_twice(engine: Path, tmp_path: Path) -> None:
    host = host_site(
        tmp_path,
        f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n"
        "import sys, importlib.machinery as m, importlib.util as u, os\n"
        "here = os.path.dirname(__file__)\n"
        "spec = m.PathFinder.find_spec('sitecustomize', [p for p in sys.path if p != here])\n"
        "spec.loader.exec_module(u.module_from_spec(spec))\n",
    )
    found = told(start(SITE, engine, behind=(host,)))
    assert (tmp_path / "ran").read_text() == "x"
    assert (found["rpc"], found["arrival"]["ways"]) == (True, ["sitecustomize"])


@pytest.mark.parametrize("text", ["raise RuntimeError('no')", "import nothing_of_that_name", "def ("])
def test_one_that_fails_is_told_and_breaks_nothing(engine: Path, tmp_path: Path, text: str) -> None:
    host = host_site(tmp_path, text)
    done = start(SITE, engine, behind=(host,))
    found = told(done)
    assert found["rpc"]
    assert str(host / "sitecustomize.py") in done.stderr
    assert found["arrival"]["shadowed_problem"].split(":")[0] in done.stderr


def test_one_that_ends_the_interpreter_has_its_will(engine: Path, tmp_path: Path) -> None:
    host = host_site(tmp_path, "import sys\nsys.exit('this host must not be used')\n")
    done = start(SITE, engine, behind=(host,))
    assert done.returncode != 0
    assert "must not be used" in done.stderr


def test_it_runs_also_where_our_loader_is_missing(engine: Path, tmp_path: Path) -> None:
    host = host_site(tmp_path, "import sys\nsys.safe = True\n")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.safe)"],
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, (SITE.site, host)))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
    assert "the loader did not come in" in done.stderr


@pytest.mark.parametrize("broken", ["raise OSError('disk')", "WorkerBase = None"])
def test_an_engine_of_another_form_imports_all_the_same(engine: Path, broken: str) -> None:
    (engine / "vllm" / "v1" / "worker" / "worker_base.py").write_text(broken)
    code = (
        "import json\n"
        "try:\n    import vllm.v1.worker.worker_base as m; ok = 'imported'\n"
        "except OSError as error: ok = str(error)\n"
        "from nvsnap_hooks import arrival\n"
        "print(json.dumps([ok, arrival.STATE.problems]))"
    )
    ok, problems = json.loads(start(SITE, engine, code).stdout)
    assert (ok, len(problems)) == (("disk", 0) if "disk" in broken else ("imported", 1))


def test_plugin_is_found_by_name_and_may_be_loaded_again(engine: Path) -> None:
    injection = Injection(Way.PLUGIN)
    code = (
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='vllm.general_plugins')\n"
        f"assert found.name == {PLUGIN_NAME!r}\n"
        "found.load()(); found.load()()\n" + LOOK
    )
    found = told(start(injection, engine, code))
    assert found["rpc"]
    assert found["arrival"]["ways"] == ["plugin"]
    after = "import vllm.v1.worker.worker_base\n" + code
    assert told(start(injection, engine, after))["rpc"]


def test_the_plugins_metadata_has_the_loaders_version() -> None:
    sys.path.insert(0, str(INJECT))
    from nvsnap_hooks import VERSION

    (found,) = distributions(path=[str(Injection(Way.PLUGIN).plugin)])
    assert found.version == VERSION


@pytest.mark.parametrize(("chosen", "refused"), [("other", True), ("other,nvsnap", False), ("", True)])
def test_a_choice_of_plugins_that_leaves_ours_out_is_refused(chosen: str, refused: bool) -> None:
    env = {"VLLM_PLUGINS": chosen}
    Injection(Way.EXTENSION).require_settings(env)
    if refused:
        with pytest.raises(UsageError, match="keeps the loader out"):
            Injection(Way.PLUGIN).require_settings(env)
    else:
        Injection(Way.PLUGIN).require_settings(env)


def environment(injection: Injection) -> dict[str, str]:
    folders = [*injection.first(), *injection.folders()]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def test_a_target_and_a_run_choose_the_way(tmp_path: Path) -> None:
    target = load_target("vllm-cpu")
    assert target.hooks.inject is Way.EXTENSION
    other = target.injected_by("plugin")
    assert (other.hooks.inject, other.file, target.hooks.inject) == (Way.PLUGIN, target.file, Way.EXTENSION)
    with pytest.raises(UsageError, match="Did you mean 'plugin'"):
        target.injected_by("plug-in")
    text = target.file.read_text().replace("[hooks]\n", '[hooks]\ninject = "sitecustomize"\n')
    (tmp_path / "mine.toml").write_text(text)
    assert load_target(tmp_path / "mine.toml").hooks.inject is Way.SITECUSTOMIZE
    (tmp_path / "mine.toml").write_text(text.replace("sitecustomize", "sideways"))
    with pytest.raises(TargetError, match=r"hooks\.inject"):
        load_target(tmp_path / "mine.toml")


@pytest.mark.parametrize("way", list(Way))
def test_the_launch_follows_the_way(tmp_path: Path, way: Way) -> None:
    (tmp_path / "config.json").touch()
    config = LaunchConfig(
        python=Path(sys.executable), model=tmp_path, tensor_parallel=1, workdir=tmp_path, inject=way.value,
        import_paths=(tmp_path / "alias",), env={"PYTHONPATH": "/of/the/target"},
    )  # fmt: skip
    assert ("--worker-extension-cls" in vllm_launch.command(config, 8000)) is (way is Way.EXTENSION)
    folders = vllm_launch.environment(config)["PYTHONPATH"].split(os.pathsep)
    injection = Injection(way)
    expected = [*injection.first(), tmp_path / "alias", *injection.folders(), "/of/the/target"]
    assert folders == [str(folder) for folder in expected]


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_interpreters_out_of_reach_are_refused_by_name(way: Way, flag: str) -> None:
    injection = Injection(way)
    injection.require_reached([sys.executable], environment(injection))
    with pytest.raises(TargetError, match=f"runs with {flag}$|runs with {flag}\n"):
        injection.require_reached([sys.executable, flag], environment(injection))


def test_a_wrapper_script_is_looked_through(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -I "$@"\n')
    wrapper.chmod(0o755)
    with pytest.raises(TargetError, match="runs with -I"):
        SITE.require_reached([str(wrapper)], environment(SITE))


def test_another_loader_or_sitecustomize_in_front_is_refused(tmp_path: Path) -> None:
    for name, way in (("nvsnap_hooks/__init__.py", Way.EXTENSION), ("sitecustomize.py", Way.SITECUSTOMIZE)):
        folder = tmp_path / way
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
        injection = Injection(way)
        env = environment(injection)
        env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
        with pytest.raises(TargetError, match=r"finds the loader at|another sitecustomize"):
            injection.require_reached([sys.executable], env)


def test_what_is_no_python_is_left_to_the_engines_own_start(tmp_path: Path) -> None:
    SITE.require_reached(["/bin/false"], environment(SITE))
    SITE.require_reached([str(tmp_path / "missing")], environment(SITE))
