from lit_qrl.data.dataset import RolloutDataset
from lit_qrl.loop.hooks import RLCallback
from tests.tiny_run import fit


def test_its_length_is_known_and_nothing_runs_before_the_first_micro_batch_is_asked_for(tmp_path):
    calls = []

    class Trace(RLCallback):
        def on_rollout_end(self, trainer, module, batch):
            calls.append(len(batch))

    _, module, data = fit(
        tmp_path, callbacks=[Trace()], data={"passes": 2, "micro_batches": 4}, trainer={"max_epochs": 1}
    )
    dataset = RolloutDataset(module)
    assert len(dataset) == 2 * data.mini_batches * 4
    assert len(calls) == 1
    iter(dataset)
    assert len(calls) == 1
