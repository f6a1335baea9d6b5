import sys

from lit_qrl.rollout.vllm.patches.compiled_libraries import _of_others


def test_llvmlite_is_out_of_sight_inside_and_back_after(fake):
    modules = {name: fake(name) for name in ("llvmlite", "llvmlite.binding", "llvmlitelike")}
    seen = []

    def rebind(overrides):
        seen.append([name for name in modules if name in sys.modules])
        if overrides == "fails":
            raise KeyError

    for overrides in ("works", "fails"):
        try:
            _of_others(rebind)(overrides)
        except KeyError:
            assert overrides == "fails"
        assert all(sys.modules[name] is module for name, module in modules.items())
    assert seen == [["llvmlitelike"]] * 2
