"""Shapes that are known without files: each has the parameters of the published model."""

from plans import plan_of

from shardbook.model.shapes import hub_id, known_shapes
from shardbook.plan.cluster import build_planner

PARAMETERS = {  # as the models' cards and papers round them
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-moe": 692_036_928,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-9b": 8_953_803_264,
    "olmoe-1b-7b": 6_919_161_856,
    "glm-4.5-air": 106_852_245_504,  # without its predictor of a second token, which transformers leaves out
    "gemma-3-4b": 3_880_263_168,  # the text
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "ministral-8b": 8_019_808_256,
    "glm-4-9b": 9_400_279_040,
    "phi-4": 14_659_507_200,
}


def test_the_shapes_have_the_parameters_of_the_published_models():
    words = (
        "data.max_length=1024",
        "data.packing=false",
    )  # of one of them, recurrent blocks see all documents of a row
    found = {name: build_planner(plan_of(name, *words)).parameters for name in known_shapes()}
    assert found == PARAMETERS
    assert all(hub_id(name) in known["ids"] for name, known in known_shapes().items() if "smollm2" not in name)
