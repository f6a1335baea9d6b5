import pytest
import torch
import yaml

from lit_qrl.cli.audit import audit, of_run
from lit_qrl.cli.parser import run as called
from lit_qrl.errors import ConfigError
from lit_qrl.rollout import TransformersEngine
from tests.command_line import build_once, nested
from tests.tiny_run import LEARNED, model_folder, on_sums


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """Write the configuration of the smallest run, with other values at dotted keys, and return its path."""
    build_once(monkeypatch)

    def write(shape=None, **changes):
        given = {key.replace("__", "."): value for key, value in changes.items()}
        settings = nested({**on_sums(tmp_path, model_folder(tmp_path / "model", **(shape or {}))), **LEARNED, **given})
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(settings))
        return str(path)

    return write


def test_a_run_says_what_is_drawn_and_options_come_before_it(run_file, tmp_path):
    path = run_file(data__temperature=0.7, data__top_k=5)
    audited = of_run([path])
    assert isinstance(audited.engine, TransformersEngine)
    texts = [audited.policy.decode(ids) for ids in audited.prompts]
    assert len(texts) == 4
    assert set(texts) < {f"{i}+1=" for i in range(12)}
    assert audited.completions == 4
    assert (audited.sampling.max_tokens, audited.sampling.temperature, audited.sampling.top_k) == (4, 0.7, 5)
    assert audited.sampling.stop_token_ids == audited.policy.stop_token_ids
    assert audited.spec().kept
    assert not (tmp_path / "run").exists()
    audited = of_run([path], samples=2, completions=3, max_tokens=6, temperature=1.5)
    assert (len(audited.prompts), audited.completions) == (2, 3)
    assert (audited.sampling.max_tokens, audited.sampling.temperature) == (6, 1.5)


def test_a_run_is_measured_in_its_own_precision(run_file):
    audited = of_run([run_file(trainer__precision="bf16-true")])
    audited.load("cpu")
    assert {one.dtype for one in audited.policy.parameters()} == {torch.bfloat16}
    assert of_run([run_file(trainer__precision="bf16-mixed")]).spec().compute_dtype == torch.bfloat16


def test_truncated_rollouts_are_compared_over_the_kept_tokens(run_file, capsys):
    path = run_file(data__top_k=3)
    results = called(audit, ["--config", path, "--formats", "bf16", "fp8_row", "--device", "cpu"])
    assert results["learner"]["abs_log_ratio"] < 1e-5 < results["fp8_row"]["abs_log_ratio"]
    assert capsys.readouterr().out.splitlines()[:2] == [
        "4 prompts x 4 completions of up to 4 tokens. A completion ends with '<eos>'.",
        "drawn by TransformersEngine",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__plugins": {"class_path": "QATAligned", "init_args": {"weights": "fp8_row"}}}, "QATAligned"),
        ({"data__max_prompt_tokens": 1}, "too long"),
        ({"data__grup_size": 2}, "there is no option 'data.grup_size'. Did you mean 'data.group_size'"),
    ],
)
def test_a_run_that_cannot_be_audited(changes, message, run_file):
    with pytest.raises(ConfigError, match=message):
        of_run([run_file(**changes)])


@pytest.mark.vllm
def test_vllm_is_measured_where_the_run_draws_with_it(run_file, format_rows):
    format_rows("nvfp4", vllm=("cuda",))  # other tests of this process have emulated it on a CPU
    engine = {"class_path": "VLLMEngine", "init_args": {"enforce_eager": True, "kv_cache_gib": 0.1}}
    path = run_file({"head_dim": 32}, data__engine=engine)
    words = ["--config", path, "--formats", "fp8_row", "nvfp4", "--speed", "--device", "cpu"]
    results = called(audit, words)
    assert list(results) == ["learner", "fp8_row"]  # vLLM has no kernel for NVFP4 on a CPU
    assert results["learner"]["abs_log_ratio"] < 1e-4 < results["fp8_row"]["abs_log_ratio"] < 0.1
    assert all(row["tokens_per_second"] > 0 for row in results.values())
