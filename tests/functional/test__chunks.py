from lit_qrl.functional._chunks import even_rows, held_chunks, kernel_elements


def test_chunks_are_even_and_no_larger_than_asked():
    for count in (1, 127, 128, 5000, 8192, 65_536):
        for most in (128, 1000, 7067):
            rows = even_rows(count, most)
            chunks = -(-count // rows)
            assert rows <= most
            assert chunks == -(-count // most) or rows % 128 == 0
            assert (chunks - 1) * rows < count <= chunks * rows


def test_chunks_that_stay_leave_room_for_the_one_at_work():
    for count in range(1, 6):
        for room in range(60):
            stay = held_chunks(count, 10, room)
            assert 0 <= stay <= count
            assert stay == 0 or 10 * min(stay + 1, count) <= room
            assert stay == count or 10 * min(stay + 2, count) > room


def test_a_larger_gpu_holds_more_logits():
    held = [kernel_elements(gib << 30) for gib in (8, 24, 80, 141, 288)]
    assert held == sorted(held)
    assert all(
        2 * count <= (gib << 30) / 64 or count == 2**26 for count, gib in zip(held, (8, 24, 80, 141, 288), strict=True)
    )
