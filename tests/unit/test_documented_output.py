"""Output that README.md and docs/ quote is what the program prints."""

import pytest

from tests.support.documented_output import quotes, same_form, unprintable

pytestmark = pytest.mark.fast


def test_quoted_output_is_what_the_program_prints():
    found = quotes()
    assert len(found) > 130
    assert not {quote: phrases for quote in found if (phrases := unprintable(quote.line))}


@pytest.mark.parametrize(
    "line",
    [  # which the program printed once
        "images are 192 x 192 from step 40,001 on",
        "97.6 + 96.2 % of their tokens used",
        "mIoU 83.09 % by k-NN, by 65,536 of them",
        "epoch 10 step 110, k-NN on val: 55.15 % (k 10), ... of 359 images, by 1,438 of train",
        "effective rank of features: 20.7 of 96 (RankMe), deviation 0.97, of 1,438 images of train",
        "objective: mae, 16 of 64 patches seen, encoder of 455,136 parameters",
    ],
)
def test_other_words_are_noticed(line):
    assert unprintable(line)


def test_form():
    output = "starting\n  epoch 1 step 20, loss: 6.9078, images/s: 1,234.5\nend"
    assert same_form("epoch 3 step 1,200, loss: 2.4e-07, ...", output)
    assert same_form("epoch 1 step 20, ..., images/s: ...", output)
    assert not same_form("epoch 1 step 20, loss: 6.9078", output)
    assert not same_form("epoch 1, loss: 6.9078, ...", output)
