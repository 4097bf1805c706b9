"""Files for rented machines: each starts launch/torchrun.sh, again after 75 and not after 2, and fits its tool."""

import os
import re
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
JOBSET = yaml.safe_load((LAUNCH / "kubernetes/jobset.yaml").read_text())
RUNTIME, TRAINJOB = yaml.safe_load_all((LAUNCH / "kubernetes/trainjob.yaml").read_text())
SKY = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
# `make` puts the models and schemas here, without what their tools need
MODELS = Path(sys.prefix) / "machines"


def docker_commands() -> list[str]:
    text = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_copies_what_is_there_and_starts_the_launcher():
    commands = docker_commands()
    assert commands[0].split()[0] == "FROM"
    for line in commands:
        if line.startswith("COPY"):
            assert all((ROOT / name).exists() for name in line.split()[1:-1]), line
    assert commands[-1] == 'ENTRYPOINT ["launch/torchrun.sh"]'
    version = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())[1]
    assert commands[0] == f"FROM python:{version}-slim"


@pytest.mark.parametrize("spec", [JOBSET["spec"], RUNTIME["spec"]["template"]["spec"]], ids=["jobset", "runtime"])
def test_a_wrong_recipe_is_not_started_again_and_a_saved_run_is(spec):
    assert spec["failurePolicy"]["maxRestarts"] > 0
    assert [rule["action"] for rule in spec["failurePolicy"]["rules"]] == ["FailJobSet"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2] and job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a policy for failed pods needs it
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert {"/shared", "/dev/shm"} == {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    mounted, volumes = pod["containers"][0]["volumeMounts"], pod["volumes"]
    assert {mount["name"] for mount in mounted} == {volume["name"] for volume in volumes}


def test_a_jobsets_nodes_agree():
    job = JOBSET["spec"]["replicatedJobs"][0]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    given = {each["name"]: each for each in container["env"]}
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == int(given["NODES"]["value"])
    assert int(given["NPROC"]["value"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = JOBSET["metadata"]["name"]
    assert given["HEAD"]["value"] == f"{name}-{job['name']}-0-0.{name}"  # the pod of index 0, by the set's own service


def test_a_node_count_that_the_mesh_does_not_fit_is_said_before_a_rank_starts():
    """One line of what every manifest starts; torchrun, which would wait for the other machines, is not reached."""
    jobset = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    nproc = next(each["value"] for each in jobset["env"] if each["name"] == "NPROC")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "NODES": "3",
        "NPROC": nproc,
        "HEAD": "nowhere",
        "NODE_RANK": "0",
    }
    words = ["recipes/llama70b-hsdp.toml", "parallel.dp_shard_size=32"]
    started = [str(LAUNCH / "torchrun.sh"), *words]
    done = subprocess.run(started, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(r"shardbook: mesh .* needs 64 ranks, the world has 24: .*\n", done.stderr), done.stderr


def test_what_they_start_is_a_recipe_with_keys():
    from shardbook.recipe import load_recipe

    container = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    for recipe, *words in (container["args"], TRAINJOB["spec"]["trainer"]["args"]):
        assert load_recipe(ROOT / recipe, words).run.dir == "/shared/runs"
    line = SKY["run"].splitlines()[-1]
    assert "launch/torchrun.sh" in line and "launch/torchrun.sh" in TRAINJOB["spec"]["trainer"]["command"][2]
    words = [word for word in line.split() if "=" in word and "$" not in word]
    load_recipe(ROOT / f"recipes/{SKY['envs']['RECIPE']}.toml", words)
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]


def use_models(monkeypatch, name: str) -> None:
    if not (MODELS / name).exists():
        pytest.skip(f"{MODELS / name} is not there; make .venv/.dev")
    monkeypatch.syspath_prepend(str(MODELS))


def models_of(kind: dict, monkeypatch):
    use_models(monkeypatch, "kubeflow_trainer_api")
    from kubeflow_trainer_api import models

    prefix = "JobsetV1alpha2" if kind["kind"] == "JobSet" else "TrainerV1alpha1"
    return getattr(models, prefix + kind["kind"])


def drop_empty(value):
    """`value` without what is None: a model writes every field."""
    if isinstance(value, dict):
        return {key: drop_empty(each) for key, each in value.items() if each is not None}
    return [drop_empty(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", [JOBSET, RUNTIME, TRAINJOB], ids=lambda kind: kind["kind"])
def test_kubeflows_models_know_every_field(kind, monkeypatch):
    model = models_of(kind, monkeypatch)
    assert drop_empty(model.from_dict(kind).to_dict()) == kind
    with pytest.raises(ValueError, match=r"spec|Field required|validation error"):
        model.from_dict({"spec": {"replicatedJobs": [{"nodes": 2}], "runtimeRef": {}, "template": "none"}})


def test_a_field_that_the_model_does_not_know_turns_it_red(monkeypatch):
    model = models_of(JOBSET, monkeypatch)
    planted = JOBSET | {"spec": JOBSET["spec"] | {"maxRestart": 3}}
    assert drop_empty(model.from_dict(planted).to_dict()) != planted


def test_skypilots_schema_takes_its_file(monkeypatch):
    use_models(monkeypatch, "sky")
    for name in ("sky", "sky.utils", "sky.skylet", "sky.server"):  # their own __init__ import clouds and servers
        package = types.ModuleType(name)
        package.__path__ = [str(MODELS / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, package)
    sys.modules["sky"].__version__ = "0"
    # two more that import a server; the schema asks each for one list, which is of no use here
    asked = {
        "sky.skylet.autostop_lib": {"AutostopWaitFor": types.SimpleNamespace(supported_modes=lambda: ["jobs"])},
        "sky.server.daemons": {"INTERNAL_REQUEST_DAEMONS": []},
    }
    for name, attributes in asked.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, module)
    jsonschema, schemas = import_module("jsonschema"), import_module("sky.utils.schemas")
    jsonschema.validate(SKY, schemas.get_task_schema())
    jsonschema.validate(SKY["resources"], schemas.get_resources_schema())
    for planted in (SKY | {"num_node": 2}, SKY | {"num_nodes": "two"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(planted, schemas.get_task_schema())
