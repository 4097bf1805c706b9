import pytest, reference
from cases import *
from families import write_family
from world import run_world
EP="parallel.ep_size=2"
TRY = {
 "compile": (2,[Case("zero3",1,2,2,extra=(EP,"train.compile=true"))]),
 "check": (2,[Case("zero3",1,2,2,extra=(EP,"train.check_steps=2","train.deterministic=true"))]),
 "lion": (2,[Case("zero3",1,2,2,extra=(EP,"optim.name=lion"))]),
 "muon": (2,[Case("zero3",1,2,2,extra=(EP,"optim.name=muon"))]),
 "bf16": (2,[Case("zero2",1,2,2,extra=(EP,"optim.name=adamw_bf16"))]),
 "pp": (4,[Case("zero3",1,2,4,True,pp=2,extra=(EP,)),Case("zero1",1,2,4,True,pp=2,schedule="gpipe",extra=(EP,)),Case("ddp",2,1,4,pp=2,extra=(EP,))]),
 "gen": (2,[Case("ddp",2,1,2,extra=(EP,"generate.steps=1","generate.samples=3","generate.max_new_tokens=5"))]),
 "lora": (2,[Case("zero3",1,2,2,extra=(EP,"lora.r=4")),Case("zero2",1,2,2,checkpointing="full",extra=(EP,"lora.r=4"))]),
 "offact": (2,[Case("zero3",1,2,2,checkpointing="full",extra=(EP,"offload.activations=cpu"))]),
 "off4": (4,[Case("zero3",1,4,2,True,extra=(EP,"offload.optimizer=cpu","offload.params=cpu")),Case("hsdp",2,2,2,True,extra=(EP,"offload.optimizer=cpu")),Case("zero3",1,2,4,True,pp=2,extra=(EP,"offload.optimizer=cpu")),]),
 "pp4": (4,[Case("zero3",1,2,4,True,pp=2,schedule="interleaved",chunks=2,extra=(EP,))]),
 "off": (2,[Case("zero3",1,2,2,True,extra=(EP,"offload.optimizer=cpu","offload.params=cpu")),Case("zero3",1,2,2,extra=(EP,"offload.optimizer=cpu"))]),
 "reshard": (2,[Case("zero3",1,2,2,extra=(EP,"parallel.reshard_min_params=5000"))]),
 "prefetch": (2,[Case("zero3",1,2,2,extra=(EP,"parallel.forward_prefetch=1","parallel.backward_prefetch=2")),Case("zero3",1,2,2,checkpointing="full",extra=(EP,"parallel.forward_prefetch=1"))]),
}
@pytest.mark.parametrize("what", TRY)
def test_try(what, recipe, tiny, tmp_path):
    write_family(tmp_path / "model", "qwen2_moe" if what=="prefetch" else "mixtral")
    world, cases = TRY[what]
    errors = run_world(world, run_cases, recipe, tmp_path, cases, tmp_path)
    assert not any(errors), errors
    bad=[]
    for case in cases:
        found = outcomes_of(case, tmp_path)
        steps = documents_of_steps(recipe, tiny, case.rows, ())
        want = reference.train(tmp_path / "model", steps, RATE, DECAY, max_norm=MAX_NORM if case.clips else 0.0)
        for f in (lambda: assert_replicas_agree(found), lambda: assert_exact_bytes(found), lambda: assert_events(found), lambda: assert_parity(found[0].result, want, case=case.name)):
            try: f()
            except Exception as e: bad.append((case.name, str(e)[:3000]))
    assert not bad, bad
