from lit_qrl.seeding import derive_seed


def test_seed_depends_on_every_part_and_on_their_borders():
    assert derive_seed(0, "rollout", 1) == derive_seed(0, "rollout", 1)
    seeds = {derive_seed(0, "a", 1), derive_seed(0, "a", 2), derive_seed(1, "a", 1), derive_seed(0, "b", 1)}
    assert len(seeds) == 4
    assert derive_seed("ab", "c") != derive_seed("a", "bc")
    assert all(0 <= seed < 2**63 for seed in seeds)
