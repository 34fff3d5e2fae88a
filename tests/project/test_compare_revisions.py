"""The comparison of two revisions finds a changed bit, and no difference if nothing changed."""

import pytest
import torch

from tests.compare_revisions import differences


@pytest.mark.parametrize(("first", "second"), [
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.5])), (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)), ([1, 2], [1, 2, 3]), ({"a": 1}, {"b": 1}), (1, 1.0),
])  # fmt: skip
def test_each_kind_of_difference_is_named(first, second):
    assert list(differences({"x": first}, {"x": second}, ""))
    assert not list(differences({"x": first}, {"x": first}, ""))
