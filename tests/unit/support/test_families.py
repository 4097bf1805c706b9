"""What is said of every type of transformers: the page is made of the data, and the data of the self-check."""

import json

import families
import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def committed():
    return json.loads(families.DATA.read_text())


def test_the_page_is_made_of_the_data():
    found = committed()
    page = families.PAGE.read_text()
    assert page == families.write_page(found).replace(f"transformers {transformers.__version__}", version_of(page))
    # planted: a type that changed its list
    assert page != families.write_page(found | {"llama": {"kind": "rows"}})


def version_of(page):
    return "transformers " + page.partition("with transformers ")[2].partition(".\n")[0]


def test_what_people_ask_for_is_packed():
    asked = "llama mistral ministral ministral3 qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text gemma4_text gpt_oss glm4"
    asked += (
        " glm4_moe cohere cohere2 granite olmo2 olmoe phi phi3 smollm3 mixtral deepseek_v3 llama4_text falcon stablelm"
    )
    asked += " starcoder2 gpt_neox gpt2 bloom"
    kinds = {family: said["kind"] for family, said in committed().items()}
    assert {kinds[family] for family in asked.split()} == {"packed"}
    assert {kinds[family] for family in ["qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1"]} == {
        "rows"
    }


def test_the_page_of_axes_counts_the_types_that_a_pipeline_takes():
    trained = [said for said in committed().values() if said["kind"] in ("packed", "rows")]
    split = sum("together" not in said for said in trained)
    page = (families.ROOT / "docs" / "parallel.md").read_text()
    assert f"of the {len(trained)} types that train, {split} can be split" in page


@pytest.mark.slow
def test_every_type_is_in_its_list():
    """A new transformers that moves one is seen."""
    found, want = families.ask_all(), committed()
    moved = {name: (found.get(name), want.get(name)) for name in found | want if found.get(name) != want.get(name)}
    if transformers.__version__ == version_of(families.PAGE.read_text()).removeprefix("transformers "):
        assert not moved and set(found) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    else:  # another version may have other types; those that both have are in the same list
        assert not {name for name, (here, there) in moved.items() if here and there and here["kind"] != there["kind"]}
