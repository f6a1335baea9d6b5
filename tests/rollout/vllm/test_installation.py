"""Which vLLM is accepted, seen from outside; nothing here imports vLLM."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm import installation
from lit_qrl.rollout.vllm.installation import check_installation, check_routes, installed_version


@pytest.mark.parametrize("version", ["0.26.0", "0.26.2+cpu", "0.29.0", "0.32.0"])
def test_versions_that_were_run_pass(install, version, caplog):
    install(version, cpu=True)
    assert installed_version() == (tuple(int(part) for part in version[:6].split(".")), True)
    check_installation()
    assert not caplog.messages


@pytest.mark.parametrize("version", ["0.27.0", "0.30.1", "0.33.0", "1.0.0"])
def test_another_version_is_taken_with_one_line(install, version, caplog):
    install(version, cpu=True)
    check_installation()
    (line,) = caplog.messages
    assert f"vLLM {version} was never run with lit-qrl on CPU: its first verified publish decides" in line
    assert "0.32 on CPU" in line


@pytest.mark.parametrize("version", ["0.25.3", "unknown"])
def test_an_older_version_is_refused(install, version):
    install(version, cpu=True)
    with pytest.raises(ConfigError, match=r"too old.*vLLM 0\.26 or newer.*Given: "):
        check_installation()


@pytest.mark.parametrize(
    ("names", "asked", "missing"),
    [
        (["lit_qrl_fast"], None, None),
        (["other", "lit_qrl_fast"], "x,lit_qrl_fast", None),
        (["other"], None, "not installed"),
        (["lit_qrl_fast"], "", "VLLM_PLUGINS leaves it out"),
        (["lit_qrl_fast", "old"], None, "one of another version of lit-qrl is installed: no Versions"),
    ],
)
def test_on_a_cpu_the_plug_in_is_asked_for_and_on_a_gpu_it_is_not(names, asked, missing, monkeypatch, caplog):
    def load():
        if "old" in names:
            raise ImportError("no Versions")

    found = [SimpleNamespace(name=name, load=load) for name in names]
    monkeypatch.setattr(installation, "entry_points", lambda group: found)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_PLUGINS", asked)
    with caplog.at_level("INFO", "lit_qrl"):
        installation.check_plugin("cuda")
    assert [missing in line for line in caplog.messages] == ([] if missing is None else [True])
    assert {one.levelname for one in caplog.records} <= {"WARNING" if "old" in names else "INFO"}
    if missing is None:
        installation.check_plugin("cpu")
    else:
        with pytest.raises(ConfigError, match=f"CPU build needs the plug-in.*{missing}.*packages/vllm_fast"):
            installation.check_plugin("cpu")


@pytest.mark.parametrize(
    ("cpu", "named"),
    [(True, "built for CPU, but this host has a GPU"), (False, "built for CUDA, but this host has no GPU")],
)
def test_a_build_for_the_other_device_is_refused(cpu, named, install, monkeypatch):
    install("0.32.0", cpu=cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cpu)
    with pytest.raises(ConfigError, match=named):
        check_installation()


@pytest.mark.parametrize(
    ("version", "device", "records"), [("0.32.0", "CPU", False), ("0.26.0", "GPU", True), ("0.32.0", "GPU", False)]
)
def test_routes_are_refused_by_name_and_version(install, version, device, records, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "GPU")
    install(version, cpu=device == "CPU")
    if records:
        check_routes("RouterReplay")
        return
    with pytest.raises(ConfigError, match=rf"RouterReplay needs the experts.*vLLM {version} on a {device}.*engine"):
        check_routes("RouterReplay")
