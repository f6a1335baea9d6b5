"""Which vLLM is accepted, seen from outside; nothing here imports vLLM."""

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm.installation import ANY, check_installation, check_routes, installed_version


@pytest.mark.parametrize("version", ["0.26.0", "0.26.2+cpu", "0.32.0"])
def test_versions_that_were_run_pass(install, version):
    install(version, cpu=True)
    assert installed_version() == (tuple(int(part) for part in version[:6].split(".")), True)
    check_installation()


@pytest.mark.parametrize("version", ["0.27.0", "0.29.1", "0.33.0", "1.0.0"])
def test_another_version_is_named_with_the_way_to_try_it(install, version, monkeypatch, caplog):
    monkeypatch.delenv(ANY, raising=False)
    install(version, cpu=True)
    with pytest.raises(ConfigError, match=rf"not supported.*0\.26 .* or 0\.32 .*Given: {version}.*{ANY}=1"):
        check_installation()
    monkeypatch.setenv(ANY, "1")
    check_installation()
    assert f"vLLM {version} was never run" in caplog.text


@pytest.mark.parametrize("version", ["0.25.3", "unknown"])
def test_an_older_version_cannot_be_tried(install, version, monkeypatch):
    monkeypatch.setenv(ANY, "1")
    install(version, cpu=True)
    with pytest.raises(ConfigError, match="not supported") as caught:
        check_installation()
    assert ANY not in str(caught.value)


def test_build_for_the_other_device_is_refused(install, monkeypatch):
    install("0.32.0", cpu=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CPU build, but this host has a GPU"):
        check_installation()


def test_gpu_build_needs_a_gpu(install):
    install("0.32.0", cpu=False)
    with pytest.raises(ConfigError, match="built for CUDA, but this host has no GPU"):
        check_installation()


@pytest.mark.parametrize(
    ("version", "device", "records"),
    [("0.26.0", "CPU", False), ("0.32.0", "CPU", True), ("0.26.0", "GPU", True), ("0.32.0", "GPU", False)],
)
def test_routes_are_refused_by_name_and_version(install, version, device, records, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "GPU")
    install(version, cpu=device == "CPU")
    if records:
        check_routes("RouterReplay")
        return
    with pytest.raises(ConfigError, match=rf"RouterReplay needs the experts.*vLLM {version} on a {device}.*engine"):
        check_routes("RouterReplay")
