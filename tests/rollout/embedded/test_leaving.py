import torch

from lit_qrl.rollout.embedded.decode import Drawn, Leaving


class Copy:
    """Stands for a CUDA event: the copy before it has come when somebody says so."""

    come = False

    def query(self):
        return self.come


def test_rows_are_given_away_in_order_once_their_copy_has_come():
    drawn = Drawn(torch.arange(12).view(4, 3), torch.zeros(4, 3), torch.tensor([3, 1, 2, 3]), torch.tensor([False] * 4))
    given = []
    leaving = Leaving(drawn, lambda rows, part: given.append((rows, part)))
    leaving.take([2, 0], torch.tensor([2, 0]))
    drawn.tokens.zero_()  # what is written later is not theirs
    leaving.take([1], torch.tensor([1]))
    rows, first, _ = leaving._under_way[0]
    leaving._under_way[0] = rows, first, (copy := Copy())
    leaving.hand()
    assert not given
    copy.come = True
    leaving.hand()
    leaving.hand()
    assert [rows for rows, _ in given] == [[2, 0], [1]]
    assert given[0][1].tokens.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert given[0][1].length.tolist() == [2, 3]
    assert given[1][1].tokens.tolist() == [[0, 0, 0]]
