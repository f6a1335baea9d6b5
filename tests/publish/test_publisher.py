import json

import pytest
import torch
from peft import LoraConfig

from lit_qrl.callbacks import AQNNoise, RLCallback
from lit_qrl.callbacks.publisher import WeightPublisher
from lit_qrl.errors import ConfigError
from lit_qrl.formats import get as get_format
from lit_qrl.network.adapters import merged_weights
from lit_qrl.precision import NVFP4LoRA, QATAligned, UnifiedFP8
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.embedded.loading import Modules
from lit_qrl.run.event_log import read_jsonl
from tests.evaluations import Distance
from tests.tables import csv_rows
from tests.tiny_run import TellingEngine, Watch, build, fit, model_folder

LAYER = "model.layers.0.self_attn.o_proj"
NORM = "model.layers.0.input_layernorm.weight"
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


class Evaluated(RLCallback):
    """Keeps what `look` says of (module, engine) after each evaluation."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append(self.look(pl_module, pl_module.data.engine))


def read_events(folder):
    return read_jsonl(folder / "events.jsonl")


def column(folder, name):
    """The numbers of a metric, by iteration, where there are any."""
    return [float(row[name]) for row in csv_rows(folder / "run" / "metrics.csv") if row.get(name)]


def lora_options(**publisher):
    return {
        "policy": {"lora": LoraConfig(**LORA)},
        "format": "auto",
        "publisher": publisher,
        "trainer": {"plugins": [NVFP4LoRA()], "max_epochs": 3},
        "lr": 1e-2,
    }


def test_every_iteration_gets_its_version(tmp_path):
    watch = Watch()
    fit(tmp_path, callbacks=[watch], trainer={"max_epochs": 3})
    assert watch.versions == [0, 1, 2]
    content = json.loads((tmp_path / "run" / "publish.json").read_text())
    assert content["version"] == 0
    assert content["layers"][f"{LAYER}.weight"] == "fp8_row"
    assert content["layers"][NORM] == "fp32"
    assert content["layers"].keys() == content["sizes"].keys()
    assert sum(content["sizes"].values()) == content["bytes"]
    quantized = sum(count for name, count in content["sizes"].items() if content["layers"][name] == "fp8_row")
    assert 0.5 < content["quantized_share"] < 1
    assert quantized > 0.2 * content["bytes"]
    assert (content["verified_share"], content["unverified"]) == (1.0, [])
    told = next(event for event in read_events(tmp_path / "run") if event["kind"] == "sampler")
    assert told["message"].startswith(
        f"Sampler: {content['quantized_share']:.1%} of the parameters in fp8_row; checksums of 100.0%"
    )


def test_an_evaluation_publishes_the_clean_weights_without_a_version(tmp_path):
    def look(module, engine):
        weights = merged_weights(module.policy.network)
        return all(torch.equal(engine.read_back(name), tensor) for name, tensor in weights), engine.version

    watch, held = Watch(), Evaluated(look)
    options = {"max_epochs": 3, "limit_val_batches": 1}
    fit(tmp_path, callbacks=[watch, held, AQNNoise(start=0.5, end=0.5, num_stages=2)], trainer=options)
    assert held.seen == [(True, -1), (True, 0), (True, 1), (True, 2)]
    # What an evaluation left in the engine is never drawn from: the next rollout has the sampler's own format.
    assert watch.versions == [0, 1, 2]


def distance_of_an_evaluation(folder, plugin, format="auto", **publisher):
    distance = Distance()
    options = {"limit_val_batches": 1, "plugins": [plugin]}
    trainer, module, data = build(folder, callbacks=[distance], format=format, publisher=publisher, trainer=options)
    trainer.validate(module, datamodule=data, verbose=False)
    return distance.seen[0]


@pytest.mark.parametrize("plugin", [QATAligned, UnifiedFP8])
def test_under_an_aligned_plugin_an_evaluation_is_of_the_quantized_policy(tmp_path, plugin):
    made = {QATAligned: lambda: QATAligned("nvfp4"), UnifiedFP8: lambda: UnifiedFP8("emulate")}[plugin]
    assert distance_of_an_evaluation(tmp_path, made()) < 1e-4
    assert distance_of_an_evaluation(tmp_path, made(), evaluation_format="rollout") < 1e-4
    assert distance_of_an_evaluation(tmp_path, made(), evaluation_format="learner") > 1e-3


def test_what_is_evaluated_is_asked_of_the_plugin_whatever_the_sampler_holds(tmp_path):
    """A sampler in another format than the learner's: `auto` still evaluates the learner's own policy."""
    for choice, same in {"auto": True, "rollout": False}.items():
        found = distance_of_an_evaluation(
            tmp_path, QATAligned("fp8_row"), "nvfp4", unaligned=True, evaluation_format=choice
        )
        assert (found < 1e-4) == same


def test_a_second_stage_of_the_same_trainer_gets_an_engine_of_its_own(tmp_path):
    trainer, module, data = fit(tmp_path, trainer={"max_epochs": 1, "limit_test_batches": 1})
    (row,) = trainer.test(module, datamodule=data, verbose=False)
    assert 0 <= row["test/accuracy"] <= 1
    trainer.fit_loop.max_epochs = 2
    watch = Watch()
    trainer.callbacks.insert(0, watch)
    trainer.fit(module, datamodule=data)
    assert watch.versions == [1]


def test_which_layers_are_quantized_is_said_in_one_place(tmp_path):
    options = {"format": "auto", "trainer": {"plugins": [QATAligned("fp8_row", exclude=["*.o_proj"])]}}
    trainer, module, data = build(tmp_path, publisher={"exclude": ["*.down_proj"]}, **options)
    with pytest.raises(ConfigError, match=r"plugin's exclude"):
        trainer.fit(module, datamodule=data)
    watch = Watch(lambda module, engine: engine.read_back(f"{LAYER}.weight").dtype)
    options["trainer"]["plugins"] = [QATAligned("fp8_row", exclude=["*.o_proj"])]
    _, _, data = fit(tmp_path, callbacks=[watch], **options)
    assert watch.seen == [torch.float32] * 2
    assert data.engine.spec.exclude == ("*.o_proj",)


def test_a_packed_base_goes_out_once_and_then_its_adapter(tmp_path):
    engine, watch = TellingEngine(), Watch()
    options = lora_options()
    options["trainer"]["limit_val_batches"] = 1
    _, module, _ = fit(tmp_path, callbacks=[watch], engine=engine, **options)
    # one evaluation before the run and one per iteration, all in the learner's own packed arithmetic
    assert engine.loads == ["load_weights"] + ["load_adapter"] * 7
    assert max(watch.mismatch) < 1e-4
    moved = module.policy.adapter_tensors()[f"base_model.model.{LAYER}.lora_B.weight"]
    assert moved.abs().max() > 0


def test_norms_are_perturbed_over_an_unchanged_base_and_come_back_clean(tmp_path):
    options = {"engine": (engine := TellingEngine()), **lora_options()}
    options["trainer"].update(max_epochs=4, limit_val_batches=1)
    clean, evaluated = (
        kind(lambda m, e: torch.equal(e.read_back(NORM), m.policy.network.get_parameter(NORM)))
        for kind in (Watch, Evaluated)
    )
    fit(tmp_path, callbacks=[AQNNoise(start=0.3, end=0.3, num_stages=2), clean, evaluated], **options)
    assert engine.loads.count("load_weights") == 1
    # two noisy rollouts, and an evaluation after each that takes the noise away
    assert engine.loads.count("perturb") == 4
    assert clean.seen == [True, True, False, False]
    assert evaluated.seen == [True] * 5
    assert max(clean.mismatch[:2]) < 1e-4
    assert min(clean.mismatch[2:]) > 1e-2


@pytest.mark.parametrize("lora", ["merged", "adapter"])
def test_an_adapter_over_a_plain_base(tmp_path, lora):
    engine, watch = TellingEngine(), Watch()
    options = {"policy": {"lora": LoraConfig(**LORA)}, "format": "auto", "trainer": {"max_epochs": 3}, "lr": 1e-2}
    fit(tmp_path, callbacks=[watch], engine=engine, publisher={"lora": lora, "probe_every": 1}, **options)
    lost = column(tmp_path, "publish/merge_lost")
    assert max(watch.mismatch) < 1e-4
    if lora == "adapter":
        assert (engine.loads, lost) == (["load_weights"] + ["load_adapter"] * 3, [])
        return
    assert engine.loads == ["load_weights"] * 3
    assert all(0 < one < 1e-3 for one in lost[-2:])  # then there is an update to lose, of which fp32 loses little
    fit(tmp_path / "again", publisher={"lora": lora, "probe_every": 0}, **options)
    (first,) = column(tmp_path / "again", "publish/merge_lost")  # without probes it is told once, of the first update
    assert 0 < first < 1e-3


def test_the_base_goes_out_again_when_an_evaluation_displaced_it(tmp_path):
    options = {"policy": {"lora": LoraConfig(**LORA)}, "publisher": {"lora": "adapter"}, "format": "auto"}
    fit(tmp_path, engine=(engine := TellingEngine()), trainer={"max_epochs": 1, "limit_val_batches": 1}, **options)
    assert engine.loads == ["load_weights", "load_weights", "load_adapter", "load_weights"]


def skip(modules, name, tensor, original):
    if name != NORM or modules.held(name).is_meta:
        original(modules, name, tensor)


def swap(modules, name, tensor, original):
    other = NORM.replace("layers.0", "layers.1")
    original(modules, {NORM: other, other: NORM}.get(name, name), tensor)


def garble(modules, name, tensor, original):
    original(modules, name, tensor * 1.001 if name == NORM else tensor)


FAULTS = {"stale": (skip, 1), "swapped": (swap, 0), "different": (garble, 0)}


def inject(monkeypatch, kind, times=None):
    fault, _ = FAULTS[kind]
    original, count = Modules.set_plain, [0]

    def broken(modules, name, tensor):
        count[0] += name == NORM
        healthy = times is not None and count[0] > times
        if healthy:
            original(modules, name, tensor)
        else:
            fault(modules, name, tensor, original)

    monkeypatch.setattr(Modules, "set_plain", broken)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_publish_that_did_not_arrive_stops_the_run_and_is_named(tmp_path, monkeypatch, kind):
    class Moved(RLCallback):
        """All norms change between publishes, so that an old one shows."""

        def on_publish(self, trainer, module, name, tensor):
            return tensor + 0.01 * trainer.current_epoch if tensor.ndim == 1 else tensor

    inject(monkeypatch, kind)
    trainer, module, data = build(tmp_path, callbacks=[Moved()], trainer={"max_epochs": 3})
    with pytest.raises(PublishError, match=f"{kind}: {NORM}") as caught:
        trainer.fit(module, datamodule=data)
    assert caught.value.version == FAULTS[kind][1]
    (event,) = [event for event in read_events(tmp_path / "run") if event["kind"] == "publish_fault"]
    assert kind in event["faults"]
    assert event["iteration"] == caught.value.version + 1


def test_one_retry_where_asked_for(tmp_path, monkeypatch):
    inject(monkeypatch, "different", times=1)
    watch = Watch()
    fit(tmp_path, callbacks=[watch], publisher={"on_fault": "retry"})
    assert watch.versions == [0, 1]
    kinds = [event["kind"] for event in read_events(tmp_path / "run")]
    assert kinds.count("publish_fault") == 1


@pytest.mark.parametrize(
    ("load", "name"), [("load_adapter", f"base_model.model.{LAYER}.lora_A.weight"), ("perturb", NORM)]
)
def test_what_is_garbled_beside_an_unchanged_base_is_named(tmp_path, monkeypatch, load, name):
    original = getattr(TransformersEngine, load)

    def garbled(engine, tensors, version):
        return original(engine, ((n, 2 * t + 1 if n == name else t) for n, t in tensors), version)

    monkeypatch.setattr(TransformersEngine, load, garbled)
    callbacks = [AQNNoise(num_stages=2)] if load == "perturb" else []
    trainer, module, data = build(tmp_path, callbacks=callbacks, **lora_options())
    with pytest.raises(PublishError, match=f"different: {name}"):
        trainer.fit(module, datamodule=data)


def test_a_sampler_may_stay_for_several_iterations_and_every_nth_publish_is_probed(tmp_path):
    engine, watch, publisher = TellingEngine(), Watch(), {"probe_every": 2, "every_n_iterations": 2}
    fit(tmp_path, callbacks=[watch], engine=engine, publisher=publisher, trainer={"max_epochs": 6})
    assert watch.versions == [0, 0, 1, 1, 2, 2]
    probed, plain = ["load_weights", "score", "generate", "generate"], ["load_weights", "generate", "generate"]
    assert engine.story == ["setup", *probed, *plain, *probed, "close"]


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("setting", ["unaligned", "aligned", "adapter"])
def test_the_probe_of_a_healthy_engine_passes_within_rounding(tmp_path, setting, noisy):
    options = {
        "unaligned": {"format": "nvfp4"},
        "aligned": {"format": "auto", "trainer": {"plugins": [QATAligned(get_format("int4_group", group_size=32))]}},
        "adapter": lora_options(),
    }[setting]
    callbacks = [AQNNoise(start=0.5, end=0.5, num_stages=2)] if noisy else []
    options["publisher"] = {"probe_every": 1}
    options["trainer"] = {**options.get("trainer", {}), "max_epochs": 2}
    trainer, _, _ = fit(tmp_path, callbacks=callbacks, **options)
    (publisher,) = [callback for callback in trainer.callbacks if isinstance(callback, WeightPublisher)]
    assert publisher.baseline < 1e-4


def test_a_quantized_head_is_sampled_from_probed_and_put_back_for_evaluations(tmp_path):
    model_folder(tmp_path / "model", tie_word_embeddings=False)
    watch, held = (kind(lambda module, engine: engine.read_back("lm_head.weight").dtype) for kind in (Watch, Evaluated))
    settings = {"publisher": {"quantize_head": True, "probe_every": 1}}
    fit(tmp_path, callbacks=[watch, held], trainer={"max_epochs": 2, "limit_val_batches": 1}, **settings)
    assert (watch.seen, held.seen) == ([torch.float8_e4m3fn] * 2, [torch.float32] * 3)
    assert max(column(tmp_path, "publish/probe_mean")) < 1e-4
    layers = json.loads((tmp_path / "run" / "publish.json").read_text())["layers"]
    assert layers["lm_head.weight"] == "fp8_row"
    assert layers["model.embed_tokens.weight"] == "fp32"
