"""The names of classes and the prompts of zero-shot classification."""

import pytest

from data.files import DataFolderError
from features.image_text.texts import lines_of
from features.image_text.zero_shot import NAME, PROMPTS, names_of

pytestmark = pytest.mark.fast


def test_the_prompts_of_clip():
    prompts = lines_of("--prompts", str(PROMPTS))
    assert len({*prompts}) == 80
    assert all(prompt.count(NAME) == 1 for prompt in prompts)
    assert (prompts[0], prompts[-1]) == ("a bad photo of a {}.", "a tattoo of the {}.")


def test_names_of_classes(tmp_path):
    assert names_of(["great_white_shark", "hen"], None) == ["great white shark", "hen"]
    file = tmp_path / "names.txt"
    file.write_bytes("\ufeffHai\r\n Henne \n\n".encode())
    assert names_of(["n01", "n02"], str(file)) == ["Hai", "Henne"]
    with pytest.raises(DataFolderError, match="has 2 lines, but there are 3 classes"):
        names_of(["n01", "n02", "n03"], str(file))
    with pytest.raises(DataFolderError, match="the folder _ is no name of a class"):
        names_of(["_", "hen"], None)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty: it needs a line for each text"),
        (b" \n\n", "is empty: it needs a line for each text"),
        (b"one\n\nthree", "line 2 is empty"),
        (b"\xff\xfe\xfd", "cannot be read: "),
    ],
)
def test_files_without_texts(content, text, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_bytes(content)
    with pytest.raises(DataFolderError, match=text):
        lines_of("--prompts", str(file))
